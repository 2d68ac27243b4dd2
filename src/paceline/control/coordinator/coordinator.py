"""The coordinator: the one process that knows the members of the job.

It admits members, carries out what the roster decides (control/membership/roster.py), keeps the
store, leases portions of work (work_pools.py), passes events on, and notifies all members when one
is lost, left, or has gone silent. It never touches tensors: training continues without it, but no
process can join.

With a journal it can be killed at any moment: what it announces is in the journal before, and the
next coordinator resumes from there (journal.py). Members then attach again by themselves.

Silence is not loss. A lost member's connection ended without a Leave: its process is gone. A silent
member sends no heartbeats; control/membership/leases.py decides what that means.

Threads: everything runs in the asyncio loop that called `start` (the launcher's, or
`CoordinatorThread` in control/client/rendezvous.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from paceline.control import messages as m
from paceline.control import operator_messages as o
from paceline.control.coordinator.journal import CoordinatorState, Journal
from paceline.control.coordinator.member_connections import (
    MemberConnection,
    MemberConnections,
    PendingMembers,
)
from paceline.control.coordinator.operator_service import OperatorService
from paceline.control.coordinator.operator_service import decoder as operator_decoder
from paceline.control.coordinator.pace_change import PaceChange
from paceline.control.coordinator.rejoining import RejoiningMembers, is_rejoin
from paceline.control.coordinator.store import StoreService
from paceline.control.coordinator.work_pools import WorkPools
from paceline.control.member import Member, Membership
from paceline.control.membership.changes import change_events
from paceline.control.membership.policy import Policy
from paceline.control.membership.roster import Roster
from paceline.control.membership.state import Decision
from paceline.control.transport.acceptor import Acceptor, Wire
from paceline.control.transport.auth import Hello, Session
from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import join_address, leaves_machine, listen_tcp
from paceline.errors import PacelineError, RendezvousError
from paceline.observe.telemetry.events import Event
from paceline.runtime.config import clock_id, encryption

_CHECK_S = 0.2
_TURN_S = 0.02

log = logging.getLogger("paceline.control")
_decoder = msgspec.msgpack.Decoder(m.MemberMessage)


class Coordinator:
    """Serves one job. `on_event` is called in the loop for every event that a member reports.

    Without a policy the job is not elastic: it keeps its initial members.
    """

    def __init__(
        self,
        job_id: str,
        secret: bytes,
        world_size: int,
        join_timeout_s: float = 60.0,
        on_event: Callable[[Event], None] | None = None,
        *,
        liveness_s: float = 5.0,
        policy: Policy | None = None,
        journal: Journal | None = None,
    ) -> None:
        if world_size < 1:
            raise RendezvousError(f"world size {world_size}: a job has at least 1 rank")
        policy = policy or Policy.fixed(world_size, liveness_s)
        self._on_event = on_event
        self.on_membership: Callable[[Membership], None] | None = None  # called in the loop
        self._store = StoreService()
        self._pools = WorkPools()
        self._state = CoordinatorState(journal, self._store, self._pools)
        self.roster = Roster(policy, self._state.state, time.monotonic())
        self._state.begin(self.roster.state)
        self._pending = PendingMembers(world_size, join_timeout_s)
        self._rejoining = RejoiningMembers()
        self._acceptor = Acceptor(secret, job_id=job_id, listener=m.COORDINATOR, admit=self._admit)
        self._members = MemberConnections()
        self._pace = PaceChange(self.roster, self._members, self.carry_out)
        self._operators = OperatorService(
            self.roster, self._state, self._members, self.carry_out, self._pace
        )
        self._watch: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._clock_id = clock_id()

    @property
    def membership(self) -> Membership | None:
        """The announced membership; None while ranks are missing."""
        return self.roster.membership

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not joined yet."""
        return self.roster.missing

    @property
    def left(self) -> set[int]:
        """The ranks that exited cleanly."""
        return self._members.left

    @property
    def _remaining(self) -> tuple[int, ...]:
        ranks = () if self.membership is None else self.membership.ranks
        return tuple(rank for rank in ranks if rank not in {*self.left, *self.lost})

    @property
    def lost(self) -> dict[int, str]:
        """The ranks that were lost, and why."""
        return self._members.lost

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen and serve; return "host:port"."""
        listener = listen_tcp(host, port)
        await self.serve(listener)
        return join_address(host, listener.getsockname()[1])

    async def serve(self, listener: socket.socket) -> None:
        """Serve on a socket that listens already."""
        if encryption() == "off" and leaves_machine(listener.getsockname()[0]):
            log.warning("PACELINE_ENCRYPT=off: connections between hosts are not encrypted")
        self._acceptor.open(listener)
        self._watch = asyncio.ensure_future(self._watch_members())
        self._watch.add_done_callback(_complain)

    async def failed(self) -> None:
        """Wait until a bug of ours stops this coordinator, and raise its error."""
        assert self._watch is not None
        await asyncio.shield(self._watch)

    async def stop(self) -> None:
        """Close all connections. Members continue without a coordinator."""
        self._is_stopping = True
        if self._watch is not None:
            self._watch.cancel()
        await self._acceptor.close()
        self._state.close()

    async def wait_until_alone(self, timeout_s: float) -> None:
        """Wait until every member has left or was lost, at most about `timeout_s`.

        Counts turns of this loop, not seconds: messages are read in turns, and a process that got
        no core meanwhile has read none.
        """
        for _ in range(math.ceil(timeout_s / _TURN_S)):
            if not self._members.all:
                return
            await asyncio.sleep(_TURN_S)

    # -- connections -------------------------------------------------------------------------

    async def _admit(self, wire: Wire, session: Session, caller: Hello) -> None:
        if caller.role == o.ROLE:
            await self._operators.serve(await Channel.over(wire, session, operator_decoder), caller)
            return
        connection = MemberConnection(await Channel.over(wire, session, _decoder), caller)
        self._members.all.add(connection)
        reason = "its connection ended"
        try:
            while connection.farewell is None:
                self._on_message(connection, await connection.channel.receive())
        except (EOFError, OSError) as error:
            log.debug("rank %d: connection ended: %r", caller.rank, error)
        except PacelineError as error:
            reason = str(error)
        finally:
            self._members.all.discard(connection)
            connection.channel.close()
            self._dismiss(connection, reason)

    def _dismiss(self, connection: MemberConnection, reason: str) -> None:
        """Forget a connection that ended, and carry out what follows if it was a member's."""
        for cancel in list(connection.waits.values()):
            cancel()
        rank, now_s = connection.caller.rank, time.monotonic()
        self._rejoining.discard(connection)
        if not self._members.counts(connection) or self._is_stopping:
            return  # it never joined, or another connection of the same member replaced it
        self._members.discard(connection)
        if self.membership is None:
            self.roster.withdraw(rank)
        elif connection.farewell is not None:
            last = connection.farewell
            self.carry_out(
                self.roster.left(
                    rank, now_s, is_finished=last.is_finished, has_lost_peer=last.has_lost_peer
                )
            )
        elif not self._operators.apply_end(rank):
            self.carry_out(self.roster.lost(rank, reason, now_s))
        self._begin_again_if_empty(now_s)

    # -- messages ----------------------------------------------------------------------------

    def _on_message(self, connection: MemberConnection, message: m.MemberMessage) -> None:
        rank, now_s = connection.caller.rank, time.monotonic()
        self.carry_out(self.roster.heard(rank, now_s))
        if isinstance(message, m.Report):
            self._pass_on(message.event)
        elif isinstance(message, m.Leave):
            connection.farewell = message
        elif isinstance(message, m.Request):
            try:
                self._on_request(connection, message, now_s)
            except PacelineError as error:
                connection.answer(message.id, error)
        elif not self._members.counts(connection):
            return  # of a process that has not joined, only requests count
        elif isinstance(message, m.Adopted):
            self.carry_out(self.roster.entered(rank, message.generation, now_s))
        elif isinstance(message, m.Accuse):
            self.roster.reported_unreachable(rank, message.rank, message.why, now_s)
        elif isinstance(message, m.InSync):
            copy = (rank, message.partition, message.generation)
            self.carry_out(self.roster.in_sync(*copy, now_s))
        elif isinstance(message, m.PaceAnswer):
            self._pace.answered(rank, message)
        elif isinstance(message, m.SettlePortions):
            self._pools.settle(rank, message)

    def _on_request(self, connection: MemberConnection, request: m.Request, now_s: float) -> None:
        if isinstance(request, m.Join):
            self._on_join(connection, request, now_s)
        elif isinstance(request, m.Ready):
            self._on_ready(connection, request, now_s)
        elif isinstance(request, m.Look):
            self._members.use(connection)
            connection.send(m.Joined(request.id, self._require_membership()))
            self._pace.greet(connection)
        elif isinstance(request, m.Attach):
            self._on_attach(connection, request, now_s)
        elif isinstance(request, m.TakePortion):
            self._require_present(connection.caller.rank)
            connection.send(self._pools.take(connection.caller.rank, request))
        elif isinstance(request, m.LookAtPool):
            connection.send(self._pools.look(request))
        elif isinstance(request, m.AskClock):
            connection.send(m.ClockIs(request.id, time.monotonic(), self._clock_id))
        else:

            def answer(value: bytes | int | bool | PacelineError | None) -> None:
                connection.answer(request.id, value)

            cancel = self._store.handle(request, answer, connection.caller.rank)
            if cancel is not None:
                connection.waits[request.id] = cancel

    def _on_join(self, connection: MemberConnection, request: m.Join, now_s: float) -> None:
        self._pending.require_open()
        connection.require_rank(request.member.rank)
        if self.membership is not None and self._state.num_replayed:
            # It had joined when the previous coordinator ended before it could answer.
            self._require_same(request.member)
            self.carry_out(self.roster.attached(request.member.rank, 1, now_s))
            self._members.use(connection)
            connection.send(m.Joined(request.id, self.membership))
            return
        if not self.roster.policy.is_elastic and is_rejoin(request.member, self.membership):
            self._rejoining.add(connection, request, now_s)
            self._begin_again_if_empty(now_s)
            return
        is_first = len(self.missing) == self.roster.first.world_size
        decisions = self.roster.join(request.member, now_s)
        self._members.use(connection)
        connection.member, connection.join = request.member, request
        self._pending.add(request, now_s, is_first=is_first)
        self.carry_out(decisions)

    def _begin_again_if_empty(self, now_s: float) -> None:
        """Begin with a first generation again if members wait for that and none is left."""
        if not self._rejoining or self._remaining:
            return
        if self.lost:
            return self._rejoining.refuse(f"the job cannot begin again: {self.lost} were lost")
        self.roster.restart(now_s)
        self._state.begin(self.roster.state)
        self._store.clear()
        self._members.begin_again()
        for connection, request in self._rejoining.take():
            self._on_join(connection, request, now_s)

    def _on_ready(self, connection: MemberConnection, request: m.Ready, now_s: float) -> None:
        connection.require_rank(request.member.rank)
        decisions = self.roster.ready(request.member, now_s)
        self._members.use(connection)
        connection.member, connection.join = request.member, request
        self.carry_out(decisions)
        membership = self._require_membership()
        if connection.join is not None and connection.caller.rank in membership.ranks:
            connection.join = None  # the previous coordinator admitted it
            connection.send(m.Joined(request.id, membership))

    def _on_attach(self, connection: MemberConnection, request: m.Attach, now_s: float) -> None:
        rank = request.member.rank
        connection.require_rank(rank)
        membership = self._require_membership()
        missed = self._state.missed(membership, request.known)
        if rank in membership.ranks or not missed.is_known or rank in missed.lost:
            self._require_same(request.member)
            decisions = self.roster.attached(rank, request.adopted, now_s)
            self._members.use(connection)
            connection.member = request.member
        else:
            decisions = []  # it was removed, and has not been notified yet
        if missed.changed is not None:
            connection.send(missed.changed)
        for loss in self.roster.state.vacant:
            connection.send(m.Presence(loss.rank, "lost", loss.why, loss.where, loss.kind))
        connection.send(m.Joined(request.id, membership))
        if self.roster.state.over:
            connection.send(m.Over(self.roster.state.over))
        self._pace.greet(connection)
        self.carry_out(decisions)

    def _require_membership(self) -> Membership:
        if self.membership is None:
            raise RendezvousError("the job is still forming: not all initial members have joined")
        return self.membership

    def _require_present(self, rank: int) -> None:
        """Refuse work to a process outside of the job: its loss would not be noticed."""
        if not (self.roster.is_present(rank) or self.roster.is_retiring(rank)):
            raise RendezvousError(f"rank {rank} is not in the job, and gets no work from it")

    def _require_same(self, member: Member) -> None:
        """Raise RendezvousError for a process that claims the rank of another one."""
        membership = self._require_membership()
        if member.rank in membership.ranks and member != membership.member(member.rank):
            raise RendezvousError(
                f"rank {member.rank} claimed twice ({membership.member(member.rank).where},"
                f" {member.where}); give every process its own rank"
            )

    def _pass_on(self, event: Event) -> None:
        self._operators.publish_event(event)
        try:
            if self._on_event is not None:
                self._on_event(event)
        except Exception:  # a callback's bug must not cost a member its connection
            log.exception("on_event failed for %r", event)

    # -- decisions ---------------------------------------------------------------------------

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        """Journal the decisions, then carry them out."""
        changes = tuple(one for one in decisions if isinstance(one, m.Changed))
        self._state.keep(self.roster.state, changes)
        before = self._state.before
        for decision in decisions:
            self._operators.publish(decision)
            if isinstance(decision, m.Changed):
                for event in change_events(before, decision):
                    self._operators.publish_event(event)
                before = decision.membership
                if before.generation == 1 and self.on_membership is not None:
                    self.on_membership(before)
                self._members.announce(decision)
            elif isinstance(decision, m.Over):
                self._members.end(decision.why)
            elif isinstance(decision, m.Presence):
                if decision.is_gone:
                    self._store.forget(decision.rank)
                    self._pools.release(decision.rank)
                self._members.send_presence(decision)
        if changes:
            self._pace.ask()
        elif decisions:
            self._pace.check()

    async def _watch_members(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            now_s = time.monotonic()
            if self.membership is None:
                self._pending.check(now_s, self._members.all, self.missing)
            else:
                self.carry_out(self.roster.tick(now_s))
                self._state.shorten()
                self._rejoining.notify(self._remaining, now_s)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the coordinator no longer checks its members", exc_info=task.exception())
