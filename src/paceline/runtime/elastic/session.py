"""ElasticSession: how one worker follows changes of the membership.

    run_step(attempt)              a retryable step: repeated among the remaining workers until it
                                   succeeds
    enter_due_generation(agreed)   at the boundary between two steps: newcomers join, and workers
                                   that are to leave exit
    join_running_job()             for a newcomer that has built its model: receives the rest

All workers of a new membership enter its generation together: they form the groups anew, exchange
their positions, and a source worker sends its state to newcomers and to workers that lag. If
another worker is lost meanwhile, that begins again with the membership after it.

On a mesh all of this happens in each data-parallel group, in step with the other processes of the
unit (unit_agreement.py).

Threads: all of this runs on the main thread (membership_watcher.py has the part of the control
thread).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import msgspec

from paceline.comm.fabric import Fabric
from paceline.comm.object_collectives import all_gather_object
from paceline.control.client.agent import Agent
from paceline.control.client.rendezvous import AnyAgent
from paceline.control.member import Membership
from paceline.errors import Evicted, PeerError, PeerLost, ProtocolError, TooLate
from paceline.observe.telemetry.events import Resumed
from paceline.runtime import console
from paceline.runtime.config import JobEnv
from paceline.runtime.elastic.free_running import FreeRunningChanges
from paceline.runtime.elastic.membership_watcher import MembershipWatcher, Retired
from paceline.runtime.elastic.recovery_plan import RecoveryPlan, WorkerStatus, plan_recovery
from paceline.runtime.elastic.unit_agreement import (
    ENTERED,
    FAILED,
    PASSED,
    UnitPosition,
    UnitVote,
)
from paceline.state import transfer
from paceline.state.protocol import Change, Part
from paceline.state.stateful_parts import StatefulParts

T = TypeVar("T")

_LAST_STEP_S = 35.0  # servers wait this long for the last step of a worker that is to leave


class ElasticSession:
    """One worker's part in a job whose members change. In any other job it has no effect."""

    def __init__(
        self, fabric: Fabric, agent: AnyAgent, env: JobEnv, unit: Fabric | None = None
    ) -> None:
        """`fabric` has the workers that hold the same state; `unit`: the unit, on a mesh."""
        self.is_on = env.is_elastic and env.role == "worker"
        self.is_joining = self.is_on and env.is_newcomer
        self.is_lockstep = True
        self.may_diverge = False  # workers may take different numbers of steps: none waits
        self.on_loss = env.on_loss
        self.next_step: Callable[[], int] = lambda: 0  # for messages: the step under way
        self.wants_stop: Callable[[], bool] = lambda: False  # this process was asked to stop
        self.num_changes = 0  # generations entered so far
        self.num_passed = 0  # retryable steps
        self.committed_steps: int | None = None  # free-running: of the number that was taken over
        self._fabric = fabric
        self._agent = agent
        self._unit = None if unit is None else UnitVote(unit)
        self._unit_size = 1 if unit is None else len(unit.membership.ranks)
        self._is_first_of_unit = unit is None or unit.membership.ranks[0] == fabric.rank
        self.parts = StatefulParts()
        self._raises = False  # see `raising_losses`
        self._settles = False  # see `run_step`
        self._result: Any = None  # of the last step passed
        self._entered = fabric.membership  # the last one that was entered completely
        self._out_since_s = 0.0  # when this worker saw in a wait that it is to leave
        if not self.is_on:
            return
        self._control = fabric.worker_group("elastic")
        assert isinstance(agent, Agent), "an elastic job has a coordinator"
        self._watcher = MembershipWatcher(fabric, agent)
        self._free_running = FreeRunningChanges(fabric, agent, self.parts, self._watcher)

    def register(self, name: str, part: Part) -> None:
        """Let a part take part in changes; under the same name on all workers."""
        self.parts.register(name, part)

    def unregister(self, name: str) -> None:
        """Let a part take part in changes no more."""
        self.parts.unregister(name)

    def watch_leaving(self, on_leaving: Callable[[], None]) -> None:
        """Call a bound method when this worker leaves as planned, if its object still lives."""
        if self.is_on:
            self._watcher.on_retire.append(weakref.WeakMethod(on_leaving))

    @contextmanager
    def raising_losses(self) -> Iterator[None]:
        """Raise a loss that is noticed in a wait for servers, instead of entering the next
        generation: the operation under way must begin again."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    # -- retryable steps ----------------------------------------------------------------------

    def run_step(
        self,
        attempt: Callable[[], T],
        when_behind: Callable[[], None] = lambda: None,
        *,
        settles: bool = False,
    ) -> T:
        """Take a retryable step: a collective whose result is plain data. It is repeated while
        workers are lost.

        If other workers had passed this step before a worker was lost, and this one had not, their
        result is returned: this worker has received their state too, and `when_behind` is called.

        `settles`: each worker can finish this step alone, in `Part.pause`. So a change in the
        middle of it is the end of it, also with `when_behind`; the result has no meaning then.
        """
        if not self.is_on:
            return attempt()
        self._settles = settles
        while True:
            try:
                result = attempt() if self._unit is None else self._attempt_with_unit(attempt)
                break
            except PeerError as error:
                if self._recover(error):
                    self._settles = False
                    when_behind()
                    return self._result  # type: ignore[no-any-return]
        self._settles = False
        self.num_passed += 1
        self._result = result
        return result

    def _attempt_with_unit(self, attempt: Callable[[], T]) -> T:
        """Take a step with the data-parallel group; it counts if the whole unit has passed it."""
        assert self._unit is not None
        failure: PeerError | None = None
        try:
            result = attempt()
        except PeerError as error:
            failure = error
        counts = self._unit.has_passed(self._position(PASSED if failure is None else FAILED))
        if failure is not None:
            raise failure
        if not counts:
            raise PeerLost(
                f"rank {self._fabric.rank}: other processes of its unit could not take this step:"
                " it is repeated"
            )
        return result

    def _position(self, state: int) -> UnitPosition:
        since, newest = self._fabric.membership.workers_since, self._agent.membership
        known = since if newest is None else newest.workers_since
        return UnitPosition(state, since, self.num_passed, known, int(self.wants_stop()))

    @property
    def is_change_due(self) -> bool:
        """Whether a membership has been announced that begins at the next boundary. On a mesh: at
        the last exchange of the unit, so that all data-parallel groups agree."""
        if not self.is_on or self._agent.membership is None:
            return False
        newest = self._agent.membership.workers_since
        if self._unit is not None:
            newest = self._unit.newest
        return newest > self._fabric.membership.workers_since

    @property
    def is_stop_due(self) -> bool:
        """Whether this process was asked to stop; on a mesh: its unit, as with a change."""
        return self.wants_stop() if self._unit is None else self._unit.wants_stop

    def enter_due_generation(self, *, agreed: bool) -> None:
        """Enter the due generation between two steps, if the workers agreed that one is due."""
        if not self.is_on:
            return
        if not self.is_lockstep:
            self._enter_alone()
        elif agreed:
            self._recover(None)

    def interrupt_wait(self) -> None:
        """Called in long waits for a server: other workers may wait for this one meanwhile.

        In lockstep they are about to enter a generation, because a worker is lost. At a
        free-running pace the server may wait for a newcomer, which needs this worker's state.
        """
        newest = self._agent.membership
        if newest is None:
            return
        if self._fabric.rank not in newest.ranks:  # a worker that is to leave does so after a step
            self._out_since_s = self._out_since_s or time.monotonic()
            if time.monotonic() - self._out_since_s > _LAST_STEP_S:
                self._watcher.retire()  # no server waits for that step any more
            return
        if not self.is_lockstep:
            self._enter_alone()
            return
        workers, losses = self._fabric.membership.workers, self._watcher.losses
        lost = [rank for rank in workers if rank not in newest.ranks and rank in losses]
        if lost and self._raises:
            text = f"rank {self._fabric.rank}: rank {lost[0]} is lost: {losses[lost[0]].why}"
            raise PeerLost(text, rank=lost[0])
        if lost:
            self._recover(None)

    # -- entering a generation ----------------------------------------------------------------

    def _recover(self, error: PeerError | None) -> bool:
        """Enter the next generation with the other workers; return whether this worker lagged."""
        started_s, passed = time.monotonic(), self.num_passed
        while True:
            membership = self._watcher.wait_for_change(error)
            try:
                self._enter(membership, started_s)
                if self._is_together():
                    return self.num_passed > passed  # perhaps since an interrupted attempt
                error = None
            except PeerError as again:
                error = again

    def _is_together(self) -> bool:
        """Return whether the whole unit is where this process is; else a unit peer is further."""
        return self._unit is None or self._unit.is_together(self._position(ENTERED))

    def _enter(self, membership: Membership, started_s: float) -> None:
        """Enter a membership with all of its workers."""
        self._fabric.enter_generation(membership, self._watcher.vanished())
        membership = self._fabric.membership
        answers = all_gather_object(self._control, self._status(membership))
        statuses = [msgspec.convert(answer, WorkerStatus) for answer in answers]
        if all(status.is_new for status in statuses):
            self._refuse_to_begin()
        plan = plan_recovery(statuses)
        if self._fabric.rank in plan.behind:
            self.parts.unstage()
        self.parts.pause()  # all others have stopped, too: they have sent their status
        change = Change(
            generation=membership.generation,
            before=plan.before,
            after=membership.workers,
            lost=plan.lost,
            joined=plan.newcomers,
            uncounted=bool(plan.lost) and self.on_loss == "shrink",
        )
        self._transfer(plan, change)
        self._control.barrier()  # no worker continues before all have what they need
        self._entered = membership
        self._finish(change, plan, started_s)

    def _status(self, membership: Membership) -> WorkerStatus:
        workers, losses = self._entered.workers, self._watcher.losses
        gone = [rank for rank in workers if rank not in membership.ranks]
        return WorkerStatus(
            rank=self._fabric.rank,
            passed=self.num_passed,
            adopted=self._entered.workers_since,
            workers=workers,
            lost=tuple(losses[rank] for rank in gone if rank in losses),
            is_new=self.is_joining,
            settles=self._settles,
        )

    def _transfer(self, plan: RecoveryPlan, change: Change) -> None:
        """Send the state of the source to the workers that need it."""
        group = self._control
        if self._fabric.rank == plan.source and plan.receivers:
            receivers = [group.ranks.index(rank) for rank in plan.receivers]
            transfer.send(group, receivers, self.parts.states(), self._result)
        elif self._fabric.rank in plan.receivers:
            states, self._result = transfer.receive(group, group.ranks.index(plan.source))
            self.parts.load(states, change)
        if self.num_passed < plan.passed:
            self.num_passed, self._settles = plan.passed, False

    def _finish(self, change: Change, plan: RecoveryPlan, started_s: float) -> None:
        was_joining, self.is_joining = self.is_joining, False
        self._resume(change)
        self._watcher.forget_losses(change.after)
        if self._fabric.rank == plan.source and not was_joining and self._is_first_of_unit:
            lost = tuple(loss.rank for loss in change.lost)
            self._report_resumed(lost, started_s, is_repeated=True)

    def _resume(self, change: Change) -> None:
        self.parts.resume(change)
        self._note_entered(change.generation)

    def _note_entered(self, generation: int) -> None:
        self.num_changes += 1
        assert isinstance(self._agent, Agent)
        self._agent.entered(generation)

    def _report_resumed(
        self, lost: tuple[int, ...], started_s: float, *, is_repeated: bool
    ) -> None:
        workers, took_s = self._fabric.membership.workers, time.monotonic() - started_s
        self._agent.report(
            Resumed(
                self._fabric.rank,
                self.next_step(),
                len(workers) * self._unit_size,
                lost,
                took_s,
                is_repeated and bool(lost),
            )
        )

    # -- newcomers ----------------------------------------------------------------------------

    def join_running_job(self) -> None:
        """Join, as a newcomer that has built its model: blocks until a peer has sent the rest.

        Without effect on a worker that is a member already.
        """
        if not self.is_joining:
            return
        try:
            self._join()
        except TooLate as error:  # not a failure: there is nothing left to do
            console.say(f"rank {self._fabric.rank} is not needed: {error}")
            self._watcher.retire()
        except Evicted as error:
            if self._unit is None:
                raise
            console.say(str(error))  # a newcomer without its unit
            raise Retired(0) from None

    def exit_for_replacement(self, why: str) -> NoReturn:
        """Exit as a newcomer that cannot join; the launcher starts another one."""
        console.say(f"rank {self._fabric.rank} exits, and a replacement will be started: {why}")
        self._watcher.retire()

    def _refuse_to_begin(self) -> NoReturn:
        """Raise: no worker is left that could send the training state."""
        if self._watcher.has_seen_farewell:
            raise TooLate("the other workers have finished and left")
        lost = [f"worker {loss.number}: {loss.why}" for loss in self._watcher.losses.values()]
        raise ProtocolError(
            f"rank {self._fabric.rank}: every worker that had the training state was lost"
            f"{' (' + '; '.join(lost) + ')' if lost else ''} before it could send it; start the"
            " job again"
        )

    def _join(self) -> None:
        assert isinstance(self._agent, Agent)
        started_s = time.monotonic()
        membership, failure = self._agent.ready(self._fabric.me), None
        while True:
            try:
                if self.is_lockstep:
                    self._enter(membership, started_s)
                else:
                    change = self._free_running.join(membership)
                    self.is_joining = False
                    self._resume(change)
                if self._is_together():
                    return
                failure = None
            except PeerError as error:
                failure = error
            membership = self._watcher.wait_for_change(failure)

    # -- at a free-running pace: no worker waits for another -----------------------------------

    def _enter_alone(self) -> None:
        """Enter the newest membership; the first worker sends its state to newcomers."""
        started_s = time.monotonic()
        lost = self._free_running.enter_newest()
        if lost is None:
            return
        if lost and self._fabric.rank == self._fabric.membership.workers[0]:
            self._report_resumed(lost, started_s, is_repeated=False)
        self._note_entered(self._fabric.membership.generation)
