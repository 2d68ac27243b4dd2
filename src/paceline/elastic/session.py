"""Elastic: how one worker goes through changes of the membership.

    point(attempt)     a collective step: repeated, among whoever is left, until it succeeds
    boundary(agreed)   between two steps: newcomers come in, and those who are to leave go
    enter()            a newcomer's way in: it has built its model, and now receives the rest

A change is ADOPTED by all workers of the new membership together: the groups are formed anew, all
tell their positions, and a donor sends its state to newcomers and to those who are behind. If
somebody else is lost meanwhile, that begins again with the membership after it.

On a mesh all of this happens among those who hold the same part of the model, in step with the
other processes of the unit (unit.py).

Threads: all of this runs on the main thread; the control thread only ends operations that wait for
somebody who is lost (`Fabric.interrupt`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import msgspec

from paceline.cluster import units
from paceline.cluster.agent import Agent
from paceline.cluster.member import Member, Membership
from paceline.cluster.messages import Changed, Loss, Presence
from paceline.cluster.notice import WaitNotice
from paceline.cluster.rendezvous import AnyAgent
from paceline.collectives.agreement import tell_all
from paceline.collectives.fabric import Fabric
from paceline.config import JobEnv
from paceline.elastic import parcel
from paceline.elastic.protocol import Change, Parcel, Participant
from paceline.elastic.unit import ADOPTED, FAILED, PASSED, Ballot, UnitVote
from paceline.elastic.verdict import Status, Verdict, judge
from paceline.errors import Evicted, PeerError, PeerLost, PeerTimeout, ProtocolError, TooLate
from paceline.telemetry.events import Note, Resumed

T = TypeVar("T")

_SLICE_S = 0.25
_ACCUSE_S = 0.5  # a peer that cannot be reached, but has not been missed by the coordinator
_LAST_STEP_S = 35.0  # servers wait for the last step of one who is to leave, but not for ever
_CUT_OFF_S = 20.0  # without the coordinator nobody knows who goes on: not us


class Retired(SystemExit):
    """This worker was asked to leave (`paceline scale`), and has: the others go on without it."""


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
        self._participants: dict[str, Participant] = {}
        self._staged: dict[str, Participant] | None = None  # see `stage`
        self._raises = False  # see `raising`
        self._parcels: dict[str, Parcel] = {}  # for participants that are not there yet
        self._result: Any = None  # of the last point passed
        self._losses: dict[int, Loss] = {}  # by rank: announced, and not adopted yet
        self._settled = fabric.membership  # the last one that was adopted whole
        self._has_seen_farewell = False
        self._out_since_s = 0.0  # when this worker saw in a wait that it is to leave
        if not self.is_on:
            return
        self._control = fabric.worker_group("elastic")
        assert isinstance(agent, Agent), "an elastic job has a coordinator"
        fabric.listen(lambda: agent.membership)
        agent.on_presence = self._on_presence
        agent.on_changed = self._on_changed

    def register(self, name: str, participant: Participant) -> None:
        """Let something take part in changes; under the same name on all workers."""
        if self._staged is not None:
            self._staged[name] = participant
            return
        self._participants[name] = participant
        if name in self._parcels:
            participant.unpack(*self._parcels.pop(name))

    def unregister(self, name: str) -> None:
        """Let something take part no more."""
        self._participants.pop(name, None)
        if self._staged is not None:
            self._staged.pop(name, None)

    def stage(self) -> None:
        """Let what is registered from now on take part only when the point under way is passed.

        Until then not everybody has it. If others have passed the point, and this worker has not,
        it has all that they have, and takes part in that very change.
        """
        self._staged = {}

    def unstage(self) -> None:
        """Let what was staged take part."""
        staged, self._staged = self._staged or {}, None
        self._participants.update(staged)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """In here a loss that is noticed in a wait for servers is raised, not adopted: what is
        under way must begin again."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    # -- from the control thread --------------------------------------------------------------

    def _on_presence(self, news: Presence) -> None:
        self._has_seen_farewell = self._has_seen_farewell or news.state == "left"
        if news.state == "lost":
            text = f"rank {self._fabric.rank}: rank {news.rank} is lost: {news.detail}"
            self._fabric.interrupt(news.rank, text)

    def _on_changed(self, news: Changed) -> None:
        for loss in news.lost:
            self._losses[loss.rank] = loss
            if loss.role == "worker":
                text = f"rank {self._fabric.rank}: worker {loss.number} is lost: {loss.why}"
                self._fabric.interrupt(loss.rank, text)

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
                self._retire()  # which nobody waits for any more
            return
        if not self.is_lockstep:
            self._adopt_alone()
            return
        workers = self._fabric.membership.workers
        lost = [rank for rank in workers if rank not in newest.ranks and rank in self._losses]
        if lost and self._raises:
            raise PeerLost(
                f"rank {self._fabric.rank}: rank {lost[0]} is lost: {self._losses[lost[0]].why}",
                rank=lost[0],
            )
        if lost:
            self._adopt(None)

    # -- adoption -----------------------------------------------------------------------------

    def _adopt(self, error: PeerError | None) -> bool:
        """Go over to the next membership with the others; true if this worker was behind."""
        started_s, passed = time.monotonic(), self.passed
        while True:
            membership = self._await_change(error)
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

    def _await_change(self, error: PeerError | None) -> Membership:
        """Wait for a membership with other workers than ours."""
        started_s = accused_s = time.monotonic()
        notice = WaitNotice(
            f"rank {self._fabric.rank} waits for the job's next membership",
            "a change of the membership",
            [rank for rank in (getattr(error, "rank", None),) if rank is not None and rank >= 0],
        )
        agent, fabric = self._agent, self._fabric
        assert isinstance(agent, Agent)
        while True:
            if agent.ending is not None:
                raise agent.ending from error
            newest = agent.membership
            if newest is not None and newest.workers_since > fabric.membership.workers_since:
                if fabric.rank not in newest.ranks:
                    self._retire()
                return newest
            now_s = time.monotonic()
            self._require_contact(now_s - started_s, error)
            culprit = getattr(error, "rank", None)
            if culprit is not None and culprit >= 0 and now_s - accused_s > _ACCUSE_S:
                accused_s = now_s  # over and over: a coordinator that is restarted forgets it
                agent.accuse(culprit, str(error)[:300])
            agent.wait_for_generation(newest.generation if newest is not None else 0, _SLICE_S)
            notice.check()

    def _retire(self) -> NoReturn:
        assert isinstance(self._agent, Agent)
        self._agent.leave(is_finished=False)
        raise Retired(0)

    def _require_contact(self, waited_s: float, error: PeerError | None) -> None:
        assert isinstance(self._agent, Agent)
        if waited_s > _CUT_OFF_S and not self._agent.is_attached:
            raise PeerTimeout(
                f"rank {self._fabric.rank}: neither its peers nor the coordinator can be reached"
                f" for {waited_s:.0f} s: this side of the network stops, so that only one goes on;"
                " see whether this host still has its network"
            ) from error

    def _enter(self, membership: Membership, started_s: float) -> None:
        """Meet the others in a membership."""
        self._fabric.adopt(membership, self._vanished())
        membership = self._fabric.membership
        answers = tell_all(self._control, self._status(membership))
        statuses = [msgspec.convert(answer, Status) for answer in answers]
        if all(status.is_new for status in statuses):
            self._refuse_to_begin()
        verdict = judge(statuses)
        if self._fabric.rank in verdict.behind:
            self.unstage()
        self._transfer(verdict)
        self._control.barrier()  # nobody goes on before everybody has what it needs
        change = Change(
            generation=membership.generation,
            before=verdict.before,
            after=membership.workers,
            lost=verdict.lost,
            joined=verdict.newcomers,
            uncounted=bool(verdict.lost) and self.on_loss == "shrink",
            told=_by_participant(statuses),
        )
        self._settled = membership
        self._finish(change, verdict, started_s)

    def _vanished(self) -> list[int]:
        """Those that may only be stopped; who has left with its unit ends by itself."""
        return [rank for rank, loss in self._losses.items() if units.LEFT not in loss.why]

    def _status(self, membership: Membership) -> Status:
        workers = self._settled.workers
        gone = [rank for rank in workers if rank not in membership.ranks]
        return Status(
            rank=self._fabric.rank,
            passed=self.passed,
            adopted=self._settled.workers_since,
            workers=workers,
            lost=tuple(self._losses[rank] for rank in gone if rank in self._losses),
            is_new=self.is_candidate,
            told={name: p.tell() for name, p in self._participants.items()},
        )

    def _transfer(self, verdict: Verdict) -> None:
        """Bring state from the donor to those who lack it."""
        group = self._control
        if self._fabric.rank == verdict.donor and verdict.receivers:
            parcels = {name: p.pack() for name, p in self._participants.items()}
            receivers = [group.ranks.index(rank) for rank in verdict.receivers]
            parcel.send(group, receivers, parcels, self._result)
        elif self._fabric.rank in verdict.receivers:
            self._take(parcel.receive(group, group.ranks.index(verdict.donor)))
        self.passed = verdict.passed

    def _take(self, shipment: parcel.Shipment) -> None:
        self._result = shipment.result
        for name, (plain, tensors) in shipment.parcels.items():
            if name in self._participants:
                self._participants[name].unpack(plain, tensors)
            else:
                self._parcels[name] = (plain, tensors)

    def _finish(self, change: Change, verdict: Verdict, started_s: float) -> None:
        was_candidate, self.is_candidate = self.is_candidate, False
        for participant in self._participants.values():
            participant.resume(change)
        self.changes += 1
        for rank in [rank for rank in self._losses if rank not in change.after]:
            del self._losses[rank]
        assert isinstance(self._agent, Agent)
        self._agent.adopted(change.generation)
        if self._fabric.rank == verdict.donor and not was_candidate and self._speaks:
            self._tell_resumed(tuple(loss.rank for loss in change.lost), started_s, repeats=True)

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
            sys.stderr.write(f"[paceline] rank {self._fabric.rank} is not needed: {error}\n")
            self._retire()
        except Evicted as error:
            if self._unit is None:
                raise
            sys.stderr.write(f"[paceline] {error}\n")  # a newcomer without its unit
            raise Retired(0) from None

    def give_way(self, why: str) -> NoReturn:
        """End as a newcomer that cannot come in as it is; another one takes its place."""
        sys.stderr.write(f"[paceline] rank {self._fabric.rank} makes way for another: {why}\n")
        self._retire()

    def _refuse_to_begin(self) -> NoReturn:
        """Nobody is left who could send the state of the training: they have left, or are lost."""
        if self._has_seen_farewell:
            raise TooLate("the other workers have finished and left")
        lost = [f"worker {loss.number}: {loss.why}" for loss in self._losses.values()]
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
                    self._enter_alone(membership)
                if self._is_together():
                    return
                failure = None
            except PeerError as error:
                failure = error
            membership = self._await_change(failure)

    # -- free-running: nobody waits for anybody -----------------------------------------------

    def _adopt_alone(self) -> None:
        """Take note of another membership; the first worker gives to those who come."""
        newest, fabric = self._agent.membership, self._fabric
        if newest is None or newest.generation <= fabric.membership.generation:
            return
        if fabric.rank not in newest.ranks:
            self._retire()
        before, started_s = fabric.membership, time.monotonic()
        fabric.adopt(newest, self._vanished())
        newest = fabric.membership
        joined = [rank for rank in newest.workers if rank not in before.workers]
        if fabric.rank == _donor(newest, joined):
            for rank in joined:
                self._give(newest.member(rank))
        gone = [rank for rank in before.ranks if self._losses.pop(rank, None) is not None]
        lost = tuple(rank for rank in gone if rank in before.workers)
        if lost and fabric.rank == newest.workers[0]:
            self._tell_resumed(lost, started_s, repeats=False)
        self.changes += 1
        assert isinstance(self._agent, Agent)
        self._agent.adopted(newest.generation)

    def _give(self, newcomer: Member) -> None:
        parcels = {name: p.pack() for name, p in self._participants.items()}
        try:
            group = self._pair(self._fabric.rank, newcomer.rank)
            parcel.send(group, [1], parcels, None)
            group.close()
        except PeerError:
            # It was lost again before it was in, which the next membership will say.
            if newcomer.rank in (self._agent.membership or self._fabric.membership).ranks:
                self._agent.report(
                    Note(self._fabric.rank, f"worker {newcomer.number} left while it came in")
                )

    def _enter_alone(self, membership: Membership) -> None:
        fabric = self._fabric
        fabric.adopt(membership, self._vanished())
        membership = fabric.membership
        donor = _donor(membership, [fabric.rank])
        if donor is None:
            raise PeerLost(f"rank {fabric.rank}: no worker is left that could send its state")
        group = self._pair(donor, fabric.rank)
        self._take(parcel.receive(group, 0))
        group.close()
        self.is_candidate = False
        change = Change(
            generation=membership.generation,
            before=tuple(rank for rank in membership.workers if rank != fabric.rank),
            after=membership.workers,
            lost=(),
            joined=(fabric.rank,),
            uncounted=False,
            told={},
        )
        for participant in self._participants.values():
            participant.resume(change)
        self.changes += 1
        assert isinstance(self._agent, Agent)
        self._agent.adopted(membership.generation)

    def _pair(self, donor: int, newcomer: int) -> Any:
        from paceline.collectives.group import Group

        other = newcomer if self._fabric.rank == donor else donor
        self._fabric.link(self._fabric.membership.member(other))
        name = f"gift {donor} {newcomer}"
        return Group(self._fabric, (donor, newcomer), name=name, generation=1)


def _donor(membership: Membership, joined: Sequence[int]) -> int | None:
    return next((rank for rank in membership.workers if rank not in joined), None)


def _by_participant(statuses: Sequence[Status]) -> dict[str, list[Any]]:
    names = {name for status in statuses for name in status.told}
    return {
        name: [None if s.is_new else s.told.get(name) for s in statuses] for name in sorted(names)
    }
