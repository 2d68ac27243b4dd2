"""The trainings of one model, one pace after the other.

A schedule says behind which step another pace begins; so may a person while the job runs (`paceline
set pace=...`). All workers change behind the same step: the training that ends leaves a plain model
and optimizer, the same on all of them (handover.py), and the next one is set up as at the start.
The script's objects stay the same, and with them schedulers, hooks and references to parameters.

A newcomer of an elastic job must be at the pace that the others are at when it comes in. It asks
which that is before it sets up its model; if they change pace before it is in, it ends, and another
one is started.

A worker may be lost at any moment of a change. There are two points in it
(runtime/elastic/session.py):

    gather    what a plain script would have, while the old training stands: it can be repeated
    set up    the next training, all of it; whoever is cut off takes it down and begins again, under
              another name, from the plain model

Between the two a change is UNDER WAY: then there is no training, and who comes in, or is behind,
gets the plain model and goes on from there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.comm.group import Group
from paceline.data_parallel.amp.grad_scaler import Skipping, bind
from paceline.data_parallel.hooks import attach
from paceline.data_parallel.model_state.checkpoint import (
    Picture,
    Restoring,
    SavedModel,
    take_picture,
)
from paceline.data_parallel.model_state.parts import give_settings, settings_of
from paceline.data_parallel.pace_switch.choice import Chosen
from paceline.data_parallel.pace_switch.handover import (
    Gathered,
    OptimizerState,
    give_state,
    params_of,
)
from paceline.data_parallel.pace_switch.requests import Wishes
from paceline.data_parallel.training import Training
from paceline.data_parallel.update.step import bind_step
from paceline.errors import PacelineError, PeerError
from paceline.options.table import Options
from paceline.pace.parse import PaceSpec
from paceline.ps.client.subscription import Subscription
from paceline.runtime.console import say
from paceline.runtime.job import Job
from paceline.state.protocol import Change, Part, State

Choose = Callable[[str], Chosen]  # what a pace comes to for this script; raises why it cannot be


class _Now(msgspec.Struct, frozen=True):
    """Where a model is in its phases, for newcomers."""

    changes: int
    pace: str
    steps: int  # when it began
    generation: int  # in which it was set up


@dataclass
class _UnderWay:
    """A change whose next training does not stand yet on all workers."""

    chosen: Chosen
    before: PaceSpec
    state: OptimizerState  # of the plain optimizer
    values: list[torch.Tensor]  # of the plain model's parameters, in order
    is_made: bool = False  # here the next training stands


class Succession(Part):
    """What a distributed model and its optimizer are bound to for good.

    It is a part (state/protocol.py): a newcomer must be at the others' pace.
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
        self._generation = 0  # in which this training was set up, if it is not the first
        self._under_way: _UnderWay | None = None
        self._heeds_after = -1  # wishes about later steps than this
        self._is_in = not job.elastic.is_candidate
        self._steps_before = 0  # at earlier paces
        first, *later = phases
        now = self._ask_others() if job.elastic.is_candidate else None
        if now is not None:
            self._changes, self._generation = now.changes, now.generation
            first = choose(now.pace)
            later = [chosen for chosen in later if chosen.start > now.steps]
        self._later = later
        self.pace = first.pace
        self.training = self._make(first)
        job.elastic.register(f"pace of {number}", self)
        self._bound = bind_step(optimizer, self.training.around_step, self._heed)
        bind(optimizer, self)
        attach(model, self)
        wishes.add(weakref.ref(self))

    def _make(self, chosen: Chosen) -> Training:
        model, optimizer = self._own()
        label = f"{self._number}{self._job.place}"
        if self._changes:
            label += f".{self._changes}.{self._generation}"
        return Training(
            self._job, self._group, model, optimizer, chosen.pace, chosen.options, label
        )

    def _own(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None, "the script has dropped its model"
        return model, optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The model's optimizer, unless the script has dropped it."""
        return self._optimizer()

    @property
    def steps(self) -> int:
        """How many steps this model's optimizer has done."""
        return self._steps_before + (0 if self._under_way else self.training.steps)

    @property
    def skipping(self) -> Skipping:
        """How the workers agree about steps that are left out, at this pace."""
        return self.training.skipping

    # -- changing the pace --------------------------------------------------------------------

    def _heed(self) -> None:
        """Behind a step: change the pace if it is time."""
        if self._under_way is not None:  # this worker has come into the middle of it
            self._set_up(self._under_way)
        for settled in self._wishes.heard(self._num_heard, self.steps):
            self._num_heard += 1
            # Else a newcomer hears what was before its time.
            if settled.step >= self.steps and settled.step > self._heeds_after:
                kept = [chosen for chosen in self._later if chosen.start < settled.step]
                wished = self._choose(settled.pace)
                self._later = [*kept, Chosen(settled.step, wished.pace, wished.options)]
        while self._later and self._later[0].start <= self.steps:
            self._change(self._later.pop(0))

    def _change(self, chosen: Chosen) -> None:
        elastic, gathered = self._job.elastic, list[Gathered]()
        self.training.finish()

        def gather() -> None:
            with elastic.raising():
                gathered[:] = [self.training.gather()]

        elastic.point(gather)
        if self._under_way is None:  # else the others were through, and have told
            steps = self.steps
            self.training.end(gathered[0])
            self._begin(chosen, gathered[0].state, steps, self._changes + 1)
        assert self._under_way is not None
        self._set_up(self._under_way)

    def _begin(self, chosen: Chosen, state: OptimizerState, steps: int, changes: int) -> None:
        """Note that a change is under way; the model is plain."""
        model, _ = self._own()
        values = [param.data for param in model.parameters()]
        self._under_way = _UnderWay(chosen, self.pace, state, values)
        self.pace, self._steps_before, self._changes = chosen.pace, steps, changes

    def _set_up(self, change: _UnderWay) -> None:
        elastic = self._job.elastic

        def attempt() -> None:
            self._begin_again(change)
            elastic.parts.stage()
            with elastic.raising():
                self._attempt(change)

        elastic.point(attempt)
        elastic.parts.unstage()
        self._under_way = None
        if self._job.speaks:
            say(
                f"behind step {self._steps_before}: pace {self.pace} instead of {change.before}:"
                f" {self.training.describe()}"
            )

    def _attempt(self, change: _UnderWay) -> None:
        """Set up the next training; all have it when this returns on any worker."""
        self._generation = self._job.fabric.membership.workers_since
        try:
            self.training = self._make(change.chosen)
            self._bound.around = self.training.around_step
        except PeerError:
            self._make_plain(change)
            raise
        change.is_made = True
        if self._job.elastic.is_on and self._job.world.rank == 0:
            now = _Now(self._changes, str(self.pace), self._steps_before, self._generation)
            self._job.rendezvous.agent.store_set(self._key, msgspec.msgpack.encode(now))
        self._group.barrier()

    def _begin_again(self, change: _UnderWay) -> None:
        if change.is_made:  # but not on all
            change.is_made = False
            self.training.end(Gathered(change.state))
            self._make_plain(change)

    def _make_plain(self, change: _UnderWay) -> None:
        """Let model and optimizer be as they were; memory that others share may never have been
        written to."""
        model, optimizer = self._own()
        for param, value in zip(model.parameters(), change.values, strict=True):
            param.data = value
        give_state(optimizer, change.state)

    # -- checkpoints --------------------------------------------------------------------------

    def take_picture(self) -> Picture:
        """Return what a checkpoint has of this model. Collective."""
        return take_picture(self.training, *self._own())

    def restore(self, saved: SavedModel, steps: int) -> list[str]:
        """Put the model to where a checkpoint has it, behind so many steps; say what was mapped.

        Collective, before the first step. If the schedule has another pace there, that is set up.
        """
        self._steps_before = steps - self.training.steps
        due = [chosen for chosen in self._later if chosen.start <= steps]
        if due:
            self._later = [chosen for chosen in self._later if chosen.start > steps]
            self._change(due[-1])
        restoring = Restoring(self.training, *self._own())
        restoring.run(saved, self._group.rank, self._group.size)
        return restoring.notices

    def restore_values(self, saved: SavedModel) -> None:
        """Load a checkpoint's parameters and buffers only. Collective, before the first step."""
        Restoring(self.training, *self._own()).load_values(saved)

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
        return f"paceline/pace of model {self._number}{self._job.place}"

    def _ask_others(self) -> _Now | None:
        agent = self._job.rendezvous.agent
        if not agent.store_check([self._key]):
            return None
        return msgspec.msgpack.decode(agent.store_get(self._key), type=_Now)

    def state(self) -> State:
        """Return where the model is in its phases; in the middle of a change, the plain model."""
        counts, change = [self._changes, self._generation, self.steps], self._under_way
        if change is None:
            return State(counts)
        _, optimizer = self._own()
        plain = {
            "pace": str(self.pace),
            "later": [[chosen.start, str(chosen.pace)] for chosen in self._later],
            "steps done": self._job.steps_done,
            "settings": settings_of(optimizer),
            "optimizer": {
                number: change.state[param]
                for number, param in enumerate(params_of(optimizer))
                if param in change.state
            },
            "values": list(change.values),
        }
        what = f"the optimizer {type(optimizer).__name__}"
        return State(counts, passing={"plain": plain}, what=what)

    def load(self, state: State, change: Change | None) -> None:  # noqa: ARG002
        changes, generation, steps = state.counts
        if "plain" in state.passing:
            self._come_into(changes, steps, state.passing["plain"])
            return
        if (changes, generation) != (self._changes, self._generation):
            self._job.elastic.give_way("the others have changed to another pace meanwhile")
        self._steps_before = steps - self.training.steps

    def _come_into(self, changes: int, steps: int, plain: Mapping[str, Any]) -> None:
        """Take over a plain model: the others are in the middle of a change."""
        if self._under_way is not None:
            return  # so is this worker, with the same
        model, optimizer = self._own()
        give_settings(optimizer, plain["settings"])
        params = params_of(optimizer)
        state = {params[number]: entries for number, entries in plain["optimizer"].items()}
        self.training.end(Gathered(state))
        with torch.no_grad():
            for param, value in zip(model.parameters(), plain["values"], strict=True):
                param.copy_(value)
        self._begin(self._choose(plain["pace"]), state, steps, changes)
        self._later = [Chosen(start, *self._wished(name)) for start, name in plain["later"]]
        self._heeds_after, self._job.reporter.steps_done = steps, plain["steps done"]

    def _wished(self, pace: str) -> tuple[PaceSpec, Options]:
        chosen = self._choose(pace)
        return chosen.pace, chosen.options

    # -- what the model is bound to (hooks.py) ------------------------------------------------

    def before_forward(self) -> None:
        self.training.before_forward()
        if not self._is_in and not self._job.elastic.is_candidate:
            self._is_in = True
            self._heed()  # they may change behind the step at which this worker came in

    def after_forward(self, output: Any) -> Any:
        return self.training.after_forward(output)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.training.no_sync()

    def agreed(self) -> AbstractContextManager[None]:
        return self.training.agreed()

    def pull(self) -> None:
        self.training.pull()

    def settle(self) -> None:
        self.training.settle()

    def subscribe(self, after: int = -1) -> Subscription:
        return self.training.subscribe(after)
