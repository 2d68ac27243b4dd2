"""Elastic: how one worker goes through changes of the membership.

    point(attempt)     a collective step: repeated, among whoever is left, until it succeeds
    boundary(agreed)   between two steps: newcomers come in, and those who are to leave go
    enter()            a newcomer's way in: it has built its model, and now receives the rest

A change is ADOPTED by all workers of the new membership together: the groups are formed anew, all
tell their positions, and a donor sends its state to newcomers and to those who are behind. If
somebody else is lost meanwhile, that begins again with the membership after it.

On a mesh all of this happens among those who hold the same part of the model, in step with the
other processes of the unit (unit_agreement.py).

Threads: all of this runs on the main thread (membership_watcher.py has what the control thread
does).
"""

from __future__ import annotations

import time
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
from paceline.runtime.elastic.free_running import Alone
from paceline.runtime.elastic.membership_watcher import News, Retired
from paceline.runtime.elastic.recovery_plan import Status, Verdict, judge
from paceline.runtime.elastic.stateful_parts import Parts
from paceline.runtime.elastic.unit_agreement import ADOPTED, FAILED, PASSED, Ballot, UnitVote
from paceline.state import transfer
from paceline.state.protocol import Change, Part

T = TypeVar("T")

_LAST_STEP_S = 35.0  # servers wait for the last step of one who is to leave, but not for ever


class Elastic:
    """One worker's part in a job whose members change. In any other job it only passes through."""

    def __init__(
        self, fabric: Fabric, agent: AnyAgent, env: JobEnv, mates: Fabric | None = None
    ) -> None:
        """`fabric` has the workers that hold the same state; `mates`: the unit, on a mesh."""
        self.is_on = env.is_elastic and env.role == "worker"
        self.is_candidate = self.is_on and env.is_newcomer
        self.is_lockstep = True
        self.may_part = False  # workers may take any numbers of steps: nobody waits for anybody
        self.on_loss = env.on_loss
        self.next_step: Callable[[], int] = lambda: 0  # for messages: the step under way
        self.wants_stop: Callable[[], bool] = lambda: False  # this process was asked to
        self.changes = 0  # adopted so far
        self.passed = 0  # points
        self.committed_steps: int | None = None  # free-running: of the number that was taken over
        self._fabric = fabric
        self._agent = agent
        self._unit = None if mates is None else UnitVote(mates)
        self._unit_size = 1 if mates is None else len(mates.membership.ranks)
        self._speaks = mates is None or mates.membership.ranks[0] == fabric.rank
        self.parts = Parts()
        self._raises = False  # see `raising`
        self._result: Any = None  # of the last point passed
        self._settled = fabric.membership  # the last one that was adopted whole
        self._out_since_s = 0.0  # when this worker saw in a wait that it is to leave
        if not self.is_on:
            return
        self._control = fabric.worker_group("elastic")
        assert isinstance(agent, Agent), "an elastic job has a coordinator"
        self._news = News(fabric, agent)
        self._alone = Alone(fabric, agent, self.parts, self._news)

    def register(self, name: str, part: Part) -> None:
        """Let something take part in changes; under the same name on all workers."""
        self.parts.register(name, part)

    def unregister(self, name: str) -> None:
        """Let something take part no more."""
        self.parts.unregister(name)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """In here a loss that is noticed in a wait for servers is raised, not adopted: what is
        under way must begin again."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    # -- points -------------------------------------------------------------------------------

    def point(self, attempt: Callable[[], T], when_behind: Callable[[], None] = lambda: None) -> T:
        """Take a collective step; its result is plain data. Repeated while workers are lost.

        If others have taken this step before somebody was lost, and this worker has not, their
        result is returned: it has received their state as well, and `when_behind` is called.
        """
        if not self.is_on:
            return attempt()
        while True:
            try:
                result = attempt() if self._unit is None else self._attempt_together(attempt)
                break
            except PeerError as error:
                if self._adopt(error):
                    when_behind()
                    return self._result  # type: ignore[no-any-return]
        self.passed += 1
        self._result = result
        return result

    def _attempt_together(self, attempt: Callable[[], T]) -> T:
        """Take a step with the column; it counts when the whole unit has taken it."""
        assert self._unit is not None
        failure: PeerError | None = None
        try:
            result = attempt()
        except PeerError as error:
            failure = error
        counts = self._unit.has_passed(self._ballot(PASSED if failure is None else FAILED))
        if failure is not None:
            raise failure
        if not counts:
            raise PeerLost(
                f"rank {self._fabric.rank}: others of its unit could not take this step: it is"
                " taken again"
            )
        return result

    def _ballot(self, state: int) -> Ballot:
        since, newest = self._fabric.membership.workers_since, self._agent.membership
        known = since if newest is None else newest.workers_since
        return Ballot(state, since, self.passed, known, int(self.wants_stop()))

    @property
    def is_change_due(self) -> bool:
        """Whether a membership has been announced that begins at the next boundary. On a mesh: when
        the unit last told each other, so that all columns say the same."""
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

    def boundary(self, *, agreed: bool) -> None:
        """Between two steps: adopt what is due, if the workers agreed that it is."""
        if not self.is_on:
            return
        if not self.is_lockstep:
            self._adopt_alone()
        elif agreed:
            self._adopt(None)

    def interrupt_wait(self) -> None:
        """Called in long waits for a server: others may wait for this worker meanwhile.

        In lockstep they are about to adopt a change, because somebody is lost; free-running, it may
        be the newcomer without whom the server does not answer.
        """
        newest = self._agent.membership
        if newest is None:
            return
        if self._fabric.rank not in newest.ranks:  # who is to leave does so behind its step
            self._out_since_s = self._out_since_s or time.monotonic()
            if time.monotonic() - self._out_since_s > _LAST_STEP_S:
                self._news.retire()  # which nobody waits for any more
            return
        if not self.is_lockstep:
            self._adopt_alone()
            return
        workers = self._fabric.membership.workers
        lost = [rank for rank in workers if rank not in newest.ranks and rank in self._news.losses]
        if lost and self._raises:
            why = self._news.losses[lost[0]].why
            text = f"rank {self._fabric.rank}: rank {lost[0]} is lost: {why}"
            raise PeerLost(text, rank=lost[0])
        if lost:
            self._adopt(None)

    # -- adoption -----------------------------------------------------------------------------

    def _adopt(self, error: PeerError | None) -> bool:
        """Go over to the next membership with the others; true if this worker was behind."""
        started_s, passed = time.monotonic(), self.passed
        while True:
            membership = self._news.await_change(error)
            try:
                self._enter(membership, started_s)
                if self._is_together():
                    return self.passed > passed  # perhaps since an attempt that was cut off
                error = None
            except PeerError as again:
                error = again

    def _is_together(self) -> bool:
        """Say whether the whole unit is where this process is; else others are further."""
        return self._unit is None or self._unit.is_together(self._ballot(ADOPTED))

    def _enter(self, membership: Membership, started_s: float) -> None:
        """Meet the others in a membership."""
        self._fabric.enter_generation(membership, self._news.vanished())
        membership = self._fabric.membership
        answers = all_gather_object(self._control, self._status(membership))
        statuses = [msgspec.convert(answer, Status) for answer in answers]
        if all(status.is_new for status in statuses):
            self._refuse_to_begin()
        verdict = judge(statuses)
        if self._fabric.rank in verdict.behind:
            self.parts.unstage()
        change = Change(
            generation=membership.generation,
            before=verdict.before,
            after=membership.workers,
            lost=verdict.lost,
            joined=verdict.newcomers,
            uncounted=bool(verdict.lost) and self.on_loss == "shrink",
        )
        self._transfer(verdict, change)
        self._control.barrier()  # nobody goes on before everybody has what it needs
        self._settled = membership
        self._finish(change, verdict, started_s)

    def _status(self, membership: Membership) -> Status:
        workers = self._settled.workers
        gone = [rank for rank in workers if rank not in membership.ranks]
        return Status(
            rank=self._fabric.rank,
            passed=self.passed,
            adopted=self._settled.workers_since,
            workers=workers,
            lost=tuple(self._news.losses[rank] for rank in gone if rank in self._news.losses),
            is_new=self.is_candidate,
        )

    def _transfer(self, verdict: Verdict, change: Change) -> None:
        """Bring state from the donor to those who lack it."""
        group = self._control
        if self._fabric.rank == verdict.donor and verdict.receivers:
            receivers = [group.ranks.index(rank) for rank in verdict.receivers]
            transfer.send(group, receivers, self.parts.states(), self._result)
        elif self._fabric.rank in verdict.receivers:
            states, self._result = transfer.receive(group, group.ranks.index(verdict.donor))
            self.parts.load(states, change)
        self.passed = verdict.passed

    def _finish(self, change: Change, verdict: Verdict, started_s: float) -> None:
        was_candidate, self.is_candidate = self.is_candidate, False
        self._go_on(change)
        self._news.settle(change.after)
        if self._fabric.rank == verdict.donor and not was_candidate and self._speaks:
            self._tell_resumed(tuple(loss.rank for loss in change.lost), started_s, repeats=True)

    def _go_on(self, change: Change) -> None:
        self.parts.resume(change)
        self._note_adopted(change.generation)

    def _note_adopted(self, generation: int) -> None:
        self.changes += 1
        assert isinstance(self._agent, Agent)
        self._agent.adopted(generation)

    def _tell_resumed(self, lost: tuple[int, ...], started_s: float, *, repeats: bool) -> None:
        workers, took_s = self._fabric.membership.workers, time.monotonic() - started_s
        self._agent.report(
            Resumed(
                self._fabric.rank,
                self.next_step(),
                len(workers) * self._unit_size,
                lost,
                took_s,
                repeats and bool(lost),
            )
        )

    # -- newcomers ----------------------------------------------------------------------------

    def enter(self) -> None:
        """Come in, as a newcomer that has built its model: blocks until a peer has sent the rest.

        Without effect on a worker that is in already.
        """
        if not self.is_candidate:
            return
        try:
            self._come_in()
        except TooLate as error:  # nothing is wrong: there is nothing left to do
            console.say(f"rank {self._fabric.rank} is not needed: {error}")
            self._news.retire()
        except Evicted as error:
            if self._unit is None:
                raise
            console.say(str(error))  # a newcomer without its unit
            raise Retired(0) from None

    def give_way(self, why: str) -> NoReturn:
        """End as a newcomer that cannot come in as it is; another one takes its place."""
        console.say(f"rank {self._fabric.rank} makes way for another: {why}")
        self._news.retire()

    def _refuse_to_begin(self) -> NoReturn:
        """Nobody is left who could send the state of the training: they have left, or are lost."""
        if self._news.has_seen_farewell:
            raise TooLate("the other workers have finished and left")
        lost = [f"worker {loss.number}: {loss.why}" for loss in self._news.losses.values()]
        raise ProtocolError(
            f"rank {self._fabric.rank}: every worker that had the state of the training is lost"
            f"{' (' + '; '.join(lost) + ')' if lost else ''} before it could be handed over; start"
            " the job again"
        )

    def _come_in(self) -> None:
        assert isinstance(self._agent, Agent)
        started_s = time.monotonic()
        membership, failure = self._agent.ready(self._fabric.me), None
        while True:
            try:
                if self.is_lockstep:
                    self._enter(membership, started_s)
                else:
                    change = self._alone.enter(membership)
                    self.is_candidate = False
                    self._go_on(change)
                if self._is_together():
                    return
                failure = None
            except PeerError as error:
                failure = error
            membership = self._news.await_change(failure)

    # -- free-running: nobody waits for anybody -----------------------------------------------

    def _adopt_alone(self) -> None:
        """Take note of another membership; the first worker gives to those who come."""
        started_s = time.monotonic()
        lost = self._alone.adopt()
        if lost is None:
            return
        if lost and self._fabric.rank == self._fabric.membership.workers[0]:
            self._tell_resumed(lost, started_s, repeats=False)
        self._note_adopted(self._fabric.membership.generation)
