"""How far a Trainer is: what its checkpoints have besides the model, and what newcomers are told.

A newcomer of an elastic job, or a worker that was behind when another was lost, receives the state
of a peer at any moment in which workers meet: inside optimizer.step(), or between it and the next
batch. What belongs behind a step, or behind an epoch, is therefore done by comparing numbers, and
not because a line of the loop was reached: once for each step whoever was lost when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class FitResult:
    """What `Trainer.fit` returns."""

    history: Sequence[dict[str, float]]  # of each epoch: epoch, loss, and with validation val_...
    steps: int  # of the optimizer, those of earlier fits and runs among them
    has_stopped: bool  # before the last epoch, because a callback wished it


@dataclass
class Progress:
    """Numbers that are the same on all workers in lockstep. Has the state of one epoch's sums too,
    which are each worker's own."""

    keeps_sums: bool = True  # False in an elastic job, where the state may be a living peer's
    fit: int = 0  # which call of fit() is under way, or was the last
    first_epoch: int = 0  # of it
    epochs: int = 0  # that are over
    batches: int = 0  # of the epoch under way, up to its last step
    followed: int = 0  # steps that the scheduler has followed
    stopped_fit: int = 0  # the last one that ended early
    sums: list[float] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)

    def begin_fit(self, number: int) -> None:
        """Begin to count the epochs of a fit, unless it was under way in the run before."""
        if self.fit < number:
            self.fit, self.first_epoch = number, self.epochs

    def record(self, row: dict[str, float]) -> None:
        """Note what came out of an epoch."""
        self.history = [old for old in self.history if old["epoch"] != row["epoch"]] + [row]

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as plain data."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        own = ("keeps_sums",) if self.keeps_sums else ("keeps_sums", "sums")
        for name, value in state.items():
            if name not in own:
                setattr(self, name, value)
