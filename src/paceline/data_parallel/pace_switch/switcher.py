"""PaceSwitcher: the trainings of one model, one pace after the other.

A schedule sets the step after which another pace begins; so can an operator while the job runs
(`paceline set pace=...`). All workers change after the same step: the training that ends leaves a
plain model and optimizer, the same on all of them (handover.py), and the next one is set up as at
the start. The script's objects stay the same, and with them schedulers, hooks and references to
parameters.

A newcomer of an elastic job must be at the pace of the others when it joins. It asks for that pace
before it sets up its model; if the others change pace before it is admitted, it exits so that a
replacement can start.

A worker may be lost at any moment of a change. The change has two retryable steps
(runtime/elastic/session.py):

    gather    the state of a plain script, while the old training still exists: can be repeated
    set up    the complete next training; a worker that is interrupted takes it down and starts
              again, under another name, from the plain model

Between the two a change is PENDING: there is no training, and a worker that joins or lags gets the
plain model and continues from there.
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
from paceline.data_parallel.auto_pace.auto_pace import AutoPace
from paceline.data_parallel.hooks import attach
from paceline.data_parallel.model_state.elastic_state import group_settings, set_group_settings
from paceline.data_parallel.model_state.model_snapshot import (
    ModelLoader,
    ModelSnapshot,
    SavedModel,
    take_snapshot,
)
from paceline.data_parallel.pace_switch.choice import PhaseOptions
from paceline.data_parallel.pace_switch.handover import (
    GatheredState,
    OptimizerState,
    params_of,
    set_optimizer_state,
)
from paceline.data_parallel.pace_switch.requests import PaceRequests
from paceline.data_parallel.training import Training
from paceline.data_parallel.update.step import bind_step
from paceline.errors import PacelineError, PeerError
from paceline.options.table import Options
from paceline.pace.parse import PaceSpec
from paceline.ps.client.subscription import Subscription
from paceline.runtime.console import say
from paceline.runtime.job import Job
from paceline.state.protocol import Change, Part, State

Choose = Callable[[str], PhaseOptions]  # what a pace means for this script; raises if it cannot be


class _CurrentPace(msgspec.Struct, frozen=True):
    """The current pace of a model, for newcomers."""

    changes: int
    pace: str
    steps: int  # when it began
    generation: int  # in which it was set up


@dataclass
class _PendingChange:
    """A change whose next training does not exist on all workers yet."""

    chosen: PhaseOptions
    before: PaceSpec
    state: OptimizerState  # of the plain optimizer
    values: list[torch.Tensor]  # of the plain model's parameters, in order
    is_made: bool = False  # the next training exists on this worker


class PaceSwitcher(Part):
    """What a distributed model and its optimizer are bound to, at every pace.

    It is a part of the job's state (state/protocol.py): a newcomer must be at the others' pace.
    """

    def __init__(
        self,
        job: Job,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        phases: Sequence[PhaseOptions],
        choose: Choose,
        requests: PaceRequests,
        number: int,  # of the model, the same on all workers
    ) -> None:
        self._job = job
        self._group = group
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._choose = choose
        self._requests = requests
        self._num_seen = requests.num_agreed
        self._number = number
        self._changes = 0  # of the pace, so far
        self._generation = 0  # in which this training was set up, if it is not the first
        self._pending: _PendingChange | None = None
        self._ignores_until = -1  # requests about steps up to this one
        self._is_in = not job.elastic.is_joining
        self._steps_before = 0  # at earlier paces
        self.auto: AutoPace | None = None  # plans the pace
        first, *later = phases
        now = self._ask_others() if job.elastic.is_joining else None
        if now is not None:
            self._changes, self._generation = now.changes, now.generation
            first = choose(now.pace)
            later = [chosen for chosen in later if chosen.start > now.steps]
        self._later = later
        self.pace = first.pace
        self.training = self._make(first)
        job.elastic.register(f"pace of {number}", self)
        self._bound = bind_step(optimizer, self.training.around_step, self._change_if_due)
        bind(optimizer, self)
        attach(model, self)
        requests.add(weakref.ref(self))

    def _make(self, chosen: PhaseOptions) -> Training:
        model, optimizer = self._own()
        label = f"{self._number}{self._job.part_suffix}"
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
        """How many steps this model's optimizer has taken."""
        return self._steps_before + (0 if self._pending else self.training.steps)

    @property
    def skipping(self) -> Skipping:
        """How the workers agree about skipped steps, at this pace."""
        return self.training.skipping

    # -- changing the pace --------------------------------------------------------------------

    def _change_if_due(self) -> None:
        """Change the pace if it is time; called after a step."""
        if self._pending is not None:  # this worker joined during a change
            self._set_up(self._pending)
        for agreed in self._requests.wait_for_agreed(self._num_seen, self.steps):
            self._num_seen += 1
            # A newcomer also receives changes from before it joined.
            if agreed.step >= self.steps and agreed.step > self._ignores_until:
                kept = [chosen for chosen in self._later if chosen.start < agreed.step]
                chosen = self._choose(agreed.pace)
                self._later = [*kept, PhaseOptions(agreed.step, chosen.pace, chosen.options)]
                if self.auto is not None:
                    self.auto.follow_request(agreed.pace, agreed.step)
        planned = self.auto and self.auto.after_step(self.steps, self.training, str(self.pace))
        if planned:
            self._later.insert(0, PhaseOptions(self.steps, *self._chosen(planned)))
        while self._later and self._later[0].start <= self.steps:
            self._change(self._later.pop(0))

    def _change(self, chosen: PhaseOptions) -> None:
        elastic, gathered = self._job.elastic, list[GatheredState]()
        self.training.finish()

        def gather() -> None:
            with elastic.raising_losses():
                gathered[:] = [self.training.gather()]

        elastic.run_step(gather)
        if self._pending is None:  # else the others finished this, and sent the result
            steps = self.steps
            self.training.end(gathered[0])
            self._begin(chosen, gathered[0].state, steps, self._changes + 1)
        assert self._pending is not None
        self._set_up(self._pending)

    def _begin(self, chosen: PhaseOptions, state: OptimizerState, steps: int, changes: int) -> None:
        """Start a change; the model is plain."""
        model, _ = self._own()
        values = [param.data for param in model.parameters()]
        self._pending = _PendingChange(chosen, self.pace, state, values)
        self.pace, self._steps_before, self._changes = chosen.pace, steps, changes

    def _set_up(self, change: _PendingChange) -> None:
        elastic = self._job.elastic

        def attempt() -> None:
            self._begin_again(change)
            elastic.parts.stage()
            with elastic.raising_losses():
                self._attempt(change)

        elastic.run_step(attempt)
        elastic.parts.unstage()
        self._pending = None
        if self._job.is_first_worker:
            say(
                f"after step {self._steps_before}: pace {self.pace} instead of {change.before}:"
                f" {self.training.describe()}"
            )

    def _attempt(self, change: _PendingChange) -> None:
        """Set up the next training; when this returns on any worker, all have it."""
        self._generation = self._job.fabric.membership.workers_since
        try:
            self.training = self._make(change.chosen)
            self._bound.around = self.training.around_step
        except PeerError:
            self._make_plain(change)
            raise
        change.is_made = True
        if self._job.elastic.is_on and self._job.world.rank == 0:
            now = _CurrentPace(self._changes, str(self.pace), self._steps_before, self._generation)
            self._job.rendezvous.agent.store_set(self._key, msgspec.msgpack.encode(now))
        self._group.barrier()

    def _begin_again(self, change: _PendingChange) -> None:
        if change.is_made:  # but not on all workers
            change.is_made = False
            self.training.end(GatheredState(change.state))
            self._make_plain(change)

    def _make_plain(self, change: _PendingChange) -> None:
        """Restore model and optimizer; shared memory may never have been written to."""
        model, optimizer = self._own()
        for param, value in zip(model.parameters(), change.values, strict=True):
            param.data = value
        set_optimizer_state(optimizer, change.state)

    # -- checkpoints --------------------------------------------------------------------------

    def take_snapshot(self) -> ModelSnapshot:
        """Return the state of this model for a checkpoint. Collective."""
        return take_snapshot(self.training, *self._own())

    def restore(self, saved: SavedModel, steps: int) -> list[str]:
        """Load the state of a checkpoint, of that step; return what was remapped.

        Collective, before the first step. If the schedule has another pace at that step, the model
        changes to it.
        """
        self._steps_before = steps - self.training.steps
        if self.auto is not None:
            self.auto.begin(steps)
        due = [chosen for chosen in self._later if chosen.start <= steps]
        if due:
            self._later = [chosen for chosen in self._later if chosen.start > steps]
            self._change(due[-1])
        restoring = ModelLoader(self.training, *self._own())
        restoring.run(saved, self._group.rank, self._group.size)
        return restoring.notices

    def restore_values(self, saved: SavedModel) -> None:
        """Load a checkpoint's parameters and buffers only. Collective, before the first step."""
        ModelLoader(self.training, *self._own()).load_values(saved)

    # -- requests (from the control thread) -----------------------------------------------------

    @property
    def limit(self) -> int:
        """A step that all workers can stop after: ahead of whatever this one does at the moment."""
        ahead = int(self.pace.value) * self._job.world.size if self.pace.name == "ssp" else 0
        return self.steps + ahead + 2

    def find_pace_problem(self, pace: str) -> str:
        """Return why this model cannot be trained at a pace; "" if it can."""
        try:
            self._choose(pace)
        except PacelineError as error:
            return str(error)
        return ""

    # -- newcomers ----------------------------------------------------------------------------

    @property
    def _key(self) -> str:
        return f"paceline/pace of model {self._number}{self._job.part_suffix}"

    def _ask_others(self) -> _CurrentPace | None:
        agent = self._job.rendezvous.agent
        if not agent.store_check([self._key]):
            return None
        return msgspec.msgpack.decode(agent.store_get(self._key), type=_CurrentPace)

    def state(self) -> State:
        """Return the current pace and step; during a change, also the plain model."""
        meeting = -1 if self.auto is None else self.auto.next_step
        counts = [self._changes, self._generation, self.steps, meeting]
        change = self._pending
        if change is None:
            return State(counts)
        _, optimizer = self._own()
        plain = {
            "pace": str(self.pace),
            "later": [[chosen.start, str(chosen.pace)] for chosen in self._later],
            "steps done": self._job.steps_done,
            "settings": group_settings(optimizer),
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
        changes, generation, steps, meeting = state.counts
        if self.auto is not None:
            self.auto.next_step = meeting
        elif meeting >= 0:
            self._job.elastic.exit_for_replacement(
                "the other workers plan their pace (--pace auto, --max-wire), and this one does not"
            )
        if "plain" in state.passing:
            self._join_pending_change(changes, steps, state.passing["plain"])
            return
        if (changes, generation) != (self._changes, self._generation):
            self._job.elastic.exit_for_replacement(
                "the other workers have changed to another pace meanwhile"
            )
        self._steps_before = steps - self.training.steps

    def _join_pending_change(self, changes: int, steps: int, plain: Mapping[str, Any]) -> None:
        """Load a plain model: the other workers are in the middle of a change."""
        if self._pending is not None:
            return  # so is this worker, with the same state
        model, optimizer = self._own()
        set_group_settings(optimizer, plain["settings"])
        params = params_of(optimizer)
        state = {params[number]: entries for number, entries in plain["optimizer"].items()}
        self.training.end(GatheredState(state))
        with torch.no_grad():
            for param, value in zip(model.parameters(), plain["values"], strict=True):
                param.copy_(value)
        self._begin(self._choose(plain["pace"]), state, steps, changes)
        self._later = [PhaseOptions(start, *self._chosen(name)) for start, name in plain["later"]]
        self._ignores_until, self._job.reporter.steps_done = steps, plain["steps done"]

    def _chosen(self, pace: str) -> tuple[PaceSpec, Options]:
        chosen = self._choose(pace)
        return chosen.pace, chosen.options

    # -- ForwardObserver (hooks.py) -----------------------------------------------------------

    def before_forward(self) -> None:
        self.training.before_forward()
        if not self._is_in and not self._job.elastic.is_joining:
            self._is_in = True
            self._change_if_due()  # a change may be due after the step at which this worker joined

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
