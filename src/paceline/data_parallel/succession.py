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

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.collectives.group import Group
from paceline.data_parallel.choice import Chosen, say
from paceline.data_parallel.hooks import attach
from paceline.data_parallel.training import Training
from paceline.data_parallel.update import Step, bind_step
from paceline.data_parallel.wishes import Wishes
from paceline.elastic.protocol import Change, Parcel
from paceline.errors import PacelineError
from paceline.job import Job
from paceline.ps.subscription import Subscription

Choose = Callable[[str], Chosen]  # what a pace comes to for this script; raises why it cannot be


class _Now(msgspec.Struct, frozen=True):
    """Where a model is in its phases, for newcomers."""

    changes: int
    pace: str
    steps: int  # when it began


class Succession:
    """What a distributed model and its optimizer are bound to for good.

    It is a participant (elastic/protocol.py): a newcomer must be at the others' pace.
    """

    def __init__(
        self,
        job: Job,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        phases: Sequence[Chosen],
        choose: Choose,
        wishes: Wishes,
        number: int,  # of the model, alike on all workers
    ) -> None:
        self._job = job
        self._group = group
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._choose = choose
        self._wishes = wishes
        self._num_heard = wishes.num_settled
        self._number = number
        self._changes = 0  # of the pace, so far
        self._steps_before = 0  # at earlier paces
        first, *later = phases
        now = self._ask_others() if job.elastic.is_candidate else None
        if now is not None:
            self._changes, first = now.changes, choose(now.pace)
            later = [chosen for chosen in later if chosen.start > now.steps]
        self._later = later
        self.pace = first.pace
        self.training = self._make(first)
        job.elastic.register(f"pace of {number}", self)
        bind_step(optimizer, self._around_step)
        attach(model, self)
        wishes.add(weakref.ref(self))

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
        self._heed()
        return result

    def _heed(self) -> None:
        """Behind a step: change the pace if it is time."""
        for settled in self._wishes.heard(self._num_heard, self.steps):
            self._num_heard += 1
            if settled.step >= self.steps:  # else a newcomer hears what was before its time
                kept = [chosen for chosen in self._later if chosen.start < settled.step]
                wished = self._choose(settled.pace)
                self._later = [*kept, Chosen(settled.step, wished.pace, wished.options)]
        while self._later and self._later[0].start <= self.steps:
            self._change(self._later.pop(0))

    def _change(self, chosen: Chosen) -> None:
        before, self.pace = self.pace, chosen.pace
        steps = self.steps
        self.training.end()
        self._changes += 1
        self._steps_before = steps
        if self._job.elastic.is_on and self._job.world.rank == 0:
            now = msgspec.msgpack.encode(_Now(self._changes, str(self.pace), steps))
            self._job.rendezvous.agent.store_set(self._key, now)
        self.training = self._make(chosen)
        if self._job.world.rank == 0:
            say(
                f"behind step {steps}: pace {self.pace} instead of {before}:"
                f" {self.training.describe()}"
            )

    # -- wishes (from the control thread) -----------------------------------------------------

    @property
    def limit(self) -> int:
        """A step that all can stop behind: ahead of whatever this worker does at the moment."""
        ahead = int(self.pace.value) * self._job.world.size if self.pace.name == "ssp" else 0
        return self.steps + ahead + 2

    def problem_with(self, pace: str) -> str:
        """Say why this model cannot be trained at a pace; empty: it can."""
        try:
            self._choose(pace)
        except PacelineError as error:
            return str(error)
        return ""

    # -- newcomers ----------------------------------------------------------------------------

    @property
    def _key(self) -> str:
        return f"paceline/pace of model {self._number}"

    def _ask_others(self) -> _Now | None:
        agent = self._job.rendezvous.agent
        if not agent.store_check([self._key]):
            return None
        return msgspec.msgpack.decode(agent.store_get(self._key), type=_Now)

    def tell(self) -> None:
        """Nothing has to be known before a change is decided."""

    def pack(self) -> Parcel:
        return [self._changes, self.steps], ()

    def unpack(self, plain: Any, tensors: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        changes, steps = plain
        if changes != self._changes:
            self._job.elastic.give_way("the others have changed to another pace meanwhile")
        self._steps_before = steps - self.training.steps

    def resume(self, change: Change) -> None:
        """Nothing is left to do."""

    # -- what the model is bound to (hooks.py) ------------------------------------------------

    def before_forward(self) -> None:
        was_candidate = self._job.elastic.is_candidate
        self.training.before_forward()
        if was_candidate and not self._job.elastic.is_candidate:
            self._heed()  # they may change behind the step at which this worker came in

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
