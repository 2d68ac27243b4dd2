"""The checkpoints of a Trainer: made when training begins, saved behind each epoch or as asked.

PROGRESS is what they have besides the model, and what newcomers are told. A newcomer of an elastic
job, or a worker that was behind when another was lost, receives the state of a peer at any moment
in which workers meet: inside optimizer.step(), or between it and the next batch. What belongs
behind a step, or behind an epoch, is therefore done by comparing numbers, and not because a line of
the loop was reached: once for each step whoever was lost when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.errors import UsageError
from paceline.runtime.job import Job
from paceline.state.checkpoint.checkpoint import Checkpoint


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


def arguments_of(given: Any) -> dict[str, Any] | None:
    """Return what pl.Checkpoint is called with; None: there is none."""
    if given is None:
        return None
    if isinstance(given, Checkpoint):
        raise UsageError(
            "Trainer(checkpoint=pl.Checkpoint(...)): a Checkpoint is made behind pl.distribute,"
            " which the Trainer calls; pass what it is made with:"
            ' checkpoint={"directory": "runs/a", "every": 100}'
        )
    if isinstance(given, Mapping):
        if "directory" not in given:
            raise UsageError(
                f"Trainer(checkpoint={dict(given)!r:.80}): expected the arguments of pl.Checkpoint,"
                ' of which "directory" is missing'
            )
        return dict(given)
    if isinstance(given, (str, Path)):
        return {"directory": given}
    raise UsageError(
        f"Trainer(checkpoint={given!r:.60}): expected a directory, or the arguments of"
        ' pl.Checkpoint: {"directory": "runs/a", "every": "10min"}'
    )


class Saving:
    """Saves one Trainer."""

    def __init__(
        self,
        job: Job,
        switcher: PaceSwitcher,
        model: nn.Module,
        objects: Mapping[str, Any],
        arguments: dict[str, Any] | None,
    ) -> None:
        self._job, self._switcher = job, switcher
        self._model, self._objects, self._arguments = model, objects, arguments
        self._checkpoint: Checkpoint | None = None
        self._is_owed = False  # the end of an epoch found values on their way between workers
        self._noted = 0

    @property
    def needs_weights_only(self) -> bool:
        """Whether there is nothing to go on with but the model's values."""
        return self._arguments is not None and self._arguments.get("resume") == "weights"

    def open(self) -> None:
        """Go on from the newest checkpoint; without effect the second time. Collective."""
        if self._arguments is not None and self._checkpoint is None:
            objects = {"model": self._model, **self._objects}
            self._checkpoint = Checkpoint(**{**objects, **self._arguments})

    def step(self) -> bool:
        """Save if it is time; end the process, when all have saved, if it was asked to. Return
        whether a save has begun."""
        if self._checkpoint is None:
            return False
        self._checkpoint.step()
        if self._is_owed:
            self._save(self._checkpoint)
        return self._is_news(self._checkpoint)

    def end_epoch(self) -> bool:
        """Save behind an epoch, unless it was said when to; return whether a save has begun."""
        if self._checkpoint is None or (self._arguments or {}).get("every") is not None:
            return False
        self._save(self._checkpoint)
        return self._is_news(self._checkpoint)

    def save(self) -> bool:
        """Save now; return whether a save has begun."""
        if self._checkpoint is None:
            return False
        self._save(self._checkpoint)
        return self._is_news(self._checkpoint)

    def _save(self, checkpoint: Checkpoint) -> None:
        training = self._switcher.training
        self._is_owed = training.is_busy  # alike on all workers: in one of the next steps then
        is_elsewhere = training.is_free and self._job.elastic.is_on and self._job.world.rank != 0
        if not (self._is_owed or is_elsewhere):  # the first worker calls the others to a save
            checkpoint.save()

    def _is_news(self, checkpoint: Checkpoint) -> bool:
        before, self._noted = self._noted, checkpoint._num_saves
        return self._noted > before
