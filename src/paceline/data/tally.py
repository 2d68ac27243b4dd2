"""What was handed out in one pass: counted batch by batch, not worked out from lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass
class Tally:
    """The count of the batches of one pass, of all workers as far as this one knows."""

    next: int = 0  # the first batch that has not been counted
    samples: int = 0  # in batches that count
    padded: int = 0  # parts that repeat something with weight 0
    largest: int = 0  # samples of this worker's largest batch
    repeated: int = 0  # samples that may come again because a checkpoint was behind, at most

    def note(self, batch: int, here: int, total: int, padded: int) -> None:
        """Count a batch with so many samples here and of all; once, if it is handed out again."""
        if batch >= self.next:
            self.next = batch + 1
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
