"""The checkpoints of a Trainer: created when training begins, saved after each epoch or as
configured.

FIT PROGRESS is what checkpoints have besides the model, and what newcomers receive. A newcomer of
an elastic job, or a worker that lagged when another was lost, receives the state of a peer whenever
workers exchange data: inside optimizer.step(), or between it and the next batch. So what has to be
done after a step or an epoch is decided by comparing numbers, and not by reaching a line of the
loop. It is done once for each step, whenever a worker is lost.
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
from paceline.trainer.evaluation import Averages


@dataclass(frozen=True)
class FitResult:
    """What `Trainer.fit` returns."""

    history: Sequence[dict[str, float]]  # of each epoch: epoch, loss, and with validation val_...
    steps: int  # of the optimizer, including those of earlier fits and runs
    has_stopped: bool  # before the last epoch, because a callback asked for it


@dataclass
class FitProgress:
    """Numbers that are the same on all workers in lockstep; and the sums of the epoch under way,
    which are each worker's own."""

    keeps_sums: bool = True  # False in an elastic job, where the state may be that of a live peer
    fit: int = 0  # number of the current or last call of fit()
    first_epoch: int = 0  # of that fit
    epochs: int = 0  # that are over
    batches: int = 0  # of the epoch under way, up to its last step
    followed: int = 0  # steps after which the scheduler has stepped
    stopped_fit: int = 0  # the last fit that stopped early
    sums: list[float] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)

    def begin_fit(self, number: int) -> None:
        """Begin to count the epochs of a fit, unless it continues from the resumed run."""
        if self.fit < number:
            self.fit, self.first_epoch = number, self.epochs

    def record(self, row: dict[str, float]) -> None:
        """Add the averages of an epoch to the history."""
        self.history = [old for old in self.history if old["epoch"] != row["epoch"]] + [row]

    def __post_init__(self) -> None:
        self.averages: Averages | None = None  # of the epoch under way

    def state_dict(self) -> dict[str, Any]:
        """Return all fields as plain data. Waits for losses that a device has yet to compute."""
        if self.keeps_sums and self.averages is not None:
            self.sums = self.averages.numbers
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        own = ("keeps_sums",) if self.keeps_sums else ("keeps_sums", "sums")
        for name, value in state.items():
            if name not in own:
                setattr(self, name, value)


def arguments_of(given: Any) -> dict[str, Any] | None:
    """Return the arguments of pl.Checkpoint; None if there is none."""
    if given is None:
        return None
    if isinstance(given, Checkpoint):
        raise UsageError(
            "Trainer(checkpoint=pl.Checkpoint(...)): a Checkpoint is created after pl.distribute,"
            " which the Trainer calls; pass its arguments:"
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


class CheckpointSaver:
    """Saves the checkpoints of one Trainer."""

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
        self._is_owed = False  # a save at the end of an epoch, while values were between workers
        self._num_seen = 0

    @property
    def needs_weights_only(self) -> bool:
        """Whether only the weights of the model are loaded."""
        return self._arguments is not None and self._arguments.get("resume") == "weights"

    def open(self) -> None:
        """Resume from the newest checkpoint; no effect the second time. Collective."""
        if self._arguments is not None and self._checkpoint is None:
            objects = {"model": self._model, **self._objects}
            self._checkpoint = Checkpoint(**{**objects, **self._arguments})

    def step(self) -> bool:
        """Save if it is due. If the process was asked to stop, end it when all workers have saved.
        Return whether a save has begun."""
        if self._checkpoint is None:
            return False
        self._checkpoint.step()
        if self._is_owed:
            self._save(self._checkpoint)
        return self._has_begun(self._checkpoint)

    def end_epoch(self) -> bool:
        """Save after an epoch, unless `every` is set; return whether a save has begun."""
        if self._checkpoint is None or (self._arguments or {}).get("every") is not None:
            return False
        self._save(self._checkpoint)
        return self._has_begun(self._checkpoint)

    def save(self) -> bool:
        """Save now; return whether a save has begun."""
        if self._checkpoint is None:
            return False
        self._save(self._checkpoint)
        return self._has_begun(self._checkpoint)

    def wait(self) -> None:
        """Wait until the last save is on the disk; raise its error if it failed."""
        if self._checkpoint is not None:
            self._checkpoint.wait()

    def _save(self, checkpoint: Checkpoint) -> None:
        training = self._switcher.training
        self._is_owed = training.is_busy  # the same on all workers: saved in one of the next steps
        is_elsewhere = training.is_free and self._job.elastic.is_on and self._job.world.rank != 0
        if not (
            self._is_owed or is_elsewhere
        ):  # the first worker requests a save of the other workers
            checkpoint.save()

    def _has_begun(self, checkpoint: Checkpoint) -> bool:
        before, self._num_seen = self._num_seen, checkpoint._num_saves
        return self._num_seen > before
