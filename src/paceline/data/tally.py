"""What was handed out in one pass: counted batch by batch, not worked out from lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass
class Tally:
    """The count of one worker's batches of one pass, and of all workers' as far as it knows."""

    batches: int = 0  # of this worker
    largest: int = 0  # samples of its largest batch
    samples: int = 0  # of all workers, in batches that count
    padded: int = 0  # batches of all workers that repeat a sample with weight 0

    def note(self, here: int, total: int, padded: int) -> None:
        """Count a batch of this worker, of so many samples of all."""
        self.batches += 1
        self.samples += total
        self.padded += padded
        if here > self.largest:
            self.largest = here

    def pack(self) -> dict[str, int]:
        """Return everything as plain data."""
        return asdict(self)

    def load(self, told: Mapping[str, int]) -> None:
        """Take over what was packed."""
        for name, value in told.items():
            setattr(self, name, value)
