"""The trainings of one model, one pace after the other.

A schedule says behind which step another pace begins; so may a person while the job runs (`paceline
set pace=...`). All workers change behind the same step: the training that ends leaves a plain model
and optimizer, the same on all of them (handover.py), and the next one is set up as at the start.
The script's objects stay the same, and with them schedulers, hooks and references to parameters.

A newcomer of an elastic job must be at the pace that the others are at when it comes in. It asks
which that is before it sets up its model; if they change pace before it is in, it ends, and another
one is started.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.collectives.group import Group
from paceline.data_parallel.hooks import attach
from paceline.data_parallel.options import Options
from paceline.data_parallel.training import Training
from paceline.data_parallel.update import Step, bind_step
from paceline.job import Job
from paceline.pace.parse import PaceSpec
from paceline.ps.subscription import Subscription


@dataclass(frozen=True)
class Chosen:
    """One phase: behind which step it begins, the pace, and its options."""

    start: int
    pace: PaceSpec
    options: Options


class Succession:
    """What a distributed model and its optimizer are bound to for good."""

    def __init__(
        self,
        job: Job,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        phases: Sequence[Chosen],
        number: int,  # of the model, alike on all workers
    ) -> None:
        self._job = job
        self._group = group
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._phases = list(phases)
        self._number = number
        self._changes = 0  # of the pace, so far
        self._steps_before = 0  # at earlier paces
        first = self._phases.pop(0)
        self.pace = first.pace
        self.training = self._make(first)
        bind_step(optimizer, self._around_step)
        attach(model, self)

    def _make(self, chosen: Chosen) -> Training:
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None, "the script has dropped its model"
        label = f"{self._number}.{self._changes}" if self._changes else str(self._number)
        return Training(
            self._job, self._group, model, optimizer, chosen.pace, chosen.options, label
        )

    @property
    def steps(self) -> int:
        """How many steps this model's optimizer has done."""
        return self._steps_before + self.training.steps

    # -- changing the pace --------------------------------------------------------------------

    def _around_step(self, optimizer: torch.optim.Optimizer, step: Step) -> Any:
        result = self.training.around_step(optimizer, step)
        if self._phases:
            self._change_if_due()
        return result

    def _change_if_due(self) -> None:
        due = [chosen for chosen in self._phases if chosen.start <= self.steps]
        if not due:
            return
        self._phases = [chosen for chosen in self._phases if chosen not in due]
        before, self.pace = self.pace, due[-1].pace
        self.training.end()
        self._changes += 1
        self._steps_before = self.steps
        self.training = self._make(due[-1])
        if self._job.world.rank == 0:
            say(
                f"behind step {self.steps}: pace {self.pace} instead of {before}:"
                f" {self.training.describe()}"
            )

    # -- what the model is bound to (hooks.py) ------------------------------------------------

    def before_forward(self) -> None:
        self.training.before_forward()

    def after_forward(self, output: Any) -> Any:
        return self.training.after_forward(output)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.training.no_sync()

    def agreed(self) -> AbstractContextManager[None]:
        return self.training.agreed()

    def pull(self) -> None:
        self.training.pull()

    def subscribe(self, after: int = -1) -> Subscription:
        return self.training.subscribe(after)


def say(text: str) -> None:
    """Write a line for the person who watches."""
    sys.stderr.write(f"[paceline] {text}\n")
    sys.stderr.flush()
