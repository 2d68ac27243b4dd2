"""The coordinator: the one place that knows who is in the job.

It admits members, carries out what the roster decides (control/membership/roster.py), keeps the
store, lends portions of work (work_pools.py), passes events on, and tells everybody when a member
is lost, left, or has gone silent. It never touches tensors: while it is away training goes on, but
nobody can join.

With a journal it can be killed at any moment: what it announces is in the journal before, and its
successor goes on from there (state.py). Members then attach again by themselves.

Silence is told apart from loss. A lost member's connection ended without a Leave: its process is
gone. A silent one sends no heartbeats; what that means, control/membership/leases.py decides.

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

from paceline.control.client import operator as o
from paceline.control.coordinator.assembly import WaitingRoom
from paceline.control.coordinator.journal import Journal
from paceline.control.coordinator.member_connections import Audience, Peer
from paceline.control.coordinator.operator_service import Desk
from paceline.control.coordinator.operator_service import decoder as operator_decoder
from paceline.control.coordinator.pace_change import PaceChange
from paceline.control.coordinator.state import Record
from paceline.control.coordinator.store import StoreService
from paceline.control.coordinator.work_pools import Pools
from paceline.control.member import Member, Membership
from paceline.control.membership.changes import happenings
from paceline.control.membership.decisions import Announce, Decision, End, Tell
from paceline.control.membership.policy import Policy
from paceline.control.membership.roster import Roster
from paceline.control.transport import messages as m
from paceline.control.transport.acceptor import Gate
from paceline.control.transport.auth import Hello, Session
from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import join_address, listen_tcp
from paceline.errors import PacelineError, RendezvousError
from paceline.observe.telemetry.events import Event
from paceline.runtime.config import clock_id

_CHECK_S = 0.2
_TURN_S = 0.02

log = logging.getLogger("paceline.control")
_decoder = msgspec.msgpack.Decoder(m.MemberMessage)


class Coordinator:
    """Serves one job. `on_event` is called in the loop for every event that a member reports.

    Without a policy the job is not elastic: its members are those of its first generation.
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
        self._pools = Pools()
        self._record = Record(journal, self._store, self._pools)
        self.roster = Roster(policy, self._record.state, time.monotonic())
        self._record.begin(self.roster.state)
        self._room = WaitingRoom(world_size, join_timeout_s)
        self._gate = Gate(secret, job_id=job_id, listener=m.COORDINATOR, admit=self._admit)
        self._audience = Audience()
        self._pace = PaceChange(self.roster, self._audience, self.carry_out)
        self._desk = Desk(self.roster, self._record, self._audience, self.carry_out, self._pace)
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
        """The ranks that ended in good order."""
        return self._audience.left

    @property
    def lost(self) -> dict[int, str]:
        """The ranks that were lost, and what is known about it."""
        return self._audience.lost

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen and serve; return "host:port"."""
        listener = listen_tcp(host, port)
        await self.serve(listener)
        return join_address(host, listener.getsockname()[1])

    async def serve(self, listener: socket.socket) -> None:
        """Serve on a socket that listens already."""
        self._gate.open(listener)
        self._watch = asyncio.ensure_future(self._watch_members())
        self._watch.add_done_callback(_complain)

    async def failed(self) -> None:
        """Wait until this coordinator cannot go on, by a bug of ours, and raise what it was."""
        assert self._watch is not None
        await asyncio.shield(self._watch)

    async def stop(self) -> None:
        """End all connections. Members go on without a coordinator."""
        self._is_stopping = True
        if self._watch is not None:
            self._watch.cancel()
        await self._gate.close()
        self._record.close()

    async def wait_until_alone(self, timeout_s: float) -> None:
        """Wait until every member has left or was lost, at most so long.

        In turns of this loop, not by the clock: what members sent is read in turns, and a process
        that got no core meanwhile has read nothing.
        """
        for _ in range(math.ceil(timeout_s / _TURN_S)):
            if not self._audience.peers:
                return
            await asyncio.sleep(_TURN_S)

    # -- connections -------------------------------------------------------------------------

    async def _admit(self, sock: socket.socket, session: Session, caller: Hello) -> None:
        if caller.role == o.ROLE:
            await self._desk.serve(await Channel.over(sock, session, operator_decoder), caller)
            return
        peer = Peer(await Channel.over(sock, session, _decoder), caller)
        self._audience.peers.add(peer)
        reason = "its connection ended"
        try:
            while peer.farewell is None:
                self._on_message(peer, await peer.channel.receive())
        except (EOFError, OSError) as error:
            log.debug("rank %d: connection ended: %r", caller.rank, error)
        except PacelineError as error:
            reason = str(error)
        finally:
            self._audience.peers.discard(peer)
            peer.channel.close()
            self._dismiss(peer, reason)

    def _dismiss(self, peer: Peer, reason: str) -> None:
        """Forget a connection that ended, and decide what follows if a member went with it."""
        for forget in list(peer.waits.values()):
            forget()
        rank, now_s = peer.caller.rank, time.monotonic()
        if not self._audience.counts(peer) or self._is_stopping:
            return  # it never came in, or another connection of the same member took its place
        self._audience.unseat(peer)
        if self.membership is None:
            self.roster.withdraw(rank)
        elif peer.farewell is not None:
            said = peer.farewell
            self.carry_out(
                self.roster.left(
                    rank, now_s, is_finished=said.is_finished, is_bereft=said.is_bereft
                )
            )
        elif not self._desk.believe(rank):
            self.carry_out(self.roster.lost(rank, reason, now_s))

    # -- messages ----------------------------------------------------------------------------

    def _on_message(self, peer: Peer, message: m.MemberMessage) -> None:
        rank, now_s = peer.caller.rank, time.monotonic()
        self.carry_out(self.roster.heard(rank, now_s))
        if isinstance(message, m.Report):
            self._pass_on(message.event)
        elif isinstance(message, m.Leave):
            peer.farewell = message
        elif isinstance(message, m.Request):
            try:
                self._on_request(peer, message, now_s)
            except PacelineError as error:
                peer.answer(message.id, error)
        elif not self._audience.counts(peer):
            return  # of those who are not in, only requests count
        elif isinstance(message, m.Adopted):
            self.carry_out(self.roster.adopted(rank, message.generation, now_s))
        elif isinstance(message, m.Accuse):
            self.roster.accused(rank, message.rank, message.why, now_s)
        elif isinstance(message, m.InSync):
            said = (rank, message.partition, message.generation)
            self.carry_out(self.roster.in_sync(*said, now_s))
        elif isinstance(message, m.PaceAnswer):
            self._pace.answered(rank, message)
        elif isinstance(message, m.SettlePortions):
            self._pools.settle(rank, message)

    def _on_request(self, peer: Peer, request: m.Request, now_s: float) -> None:
        if isinstance(request, m.Join):
            self._on_join(peer, request, now_s)
        elif isinstance(request, m.Ready):
            self._on_ready(peer, request, now_s)
        elif isinstance(request, m.Look):
            self._audience.seat(peer)
            peer.tell(m.Joined(request.id, self._require_membership()))
            self._pace.greet(peer)
        elif isinstance(request, m.Attach):
            self._on_attach(peer, request, now_s)
        elif isinstance(request, m.TakePortion):
            self._require_here(peer.caller.rank)
            peer.tell(self._pools.take(peer.caller.rank, request))
        elif isinstance(request, m.LookAtPool):
            peer.tell(self._pools.look(request))
        elif isinstance(request, m.AskClock):
            peer.tell(m.ClockIs(request.id, time.monotonic(), self._clock_id))
        else:

            def answer(value: bytes | int | bool | PacelineError | None) -> None:
                peer.answer(request.id, value)

            forget = self._store.handle(request, answer, peer.caller.rank)
            if forget is not None:
                peer.waits[request.id] = forget

    def _on_join(self, peer: Peer, request: m.Join, now_s: float) -> None:
        self._room.require_open()
        _require_own_rank(peer, request.member.rank)
        if self.membership is not None and self._record.num_replayed:
            # It had joined when the coordinator ended before it could say so.
            self._require_same(request.member)
            self.carry_out(self.roster.attached(request.member.rank, 1, now_s))
            self._audience.seat(peer)
            peer.tell(m.Joined(request.id, self.membership))
            return
        is_first = len(self.missing) == self.roster.assembly.world_size
        decisions = self.roster.join(request.member, now_s)
        self._audience.seat(peer)
        peer.member, peer.join = request.member, request
        self._room.enter(request, now_s, is_first=is_first)
        self.carry_out(decisions)

    def _on_ready(self, peer: Peer, request: m.Ready, now_s: float) -> None:
        _require_own_rank(peer, request.member.rank)
        decisions = self.roster.ready(request.member, now_s)
        self._audience.seat(peer)
        peer.member, peer.join = request.member, request
        self.carry_out(decisions)
        membership = self._require_membership()
        if peer.join is not None and peer.caller.rank in membership.ranks:
            peer.join = None  # it was let in by the coordinator before us
            peer.tell(m.Joined(request.id, membership))

    def _on_attach(self, peer: Peer, request: m.Attach, now_s: float) -> None:
        rank = request.member.rank
        _require_own_rank(peer, rank)
        membership = self._require_membership()
        missed = self._record.missed(membership, request.known)
        if rank in membership.ranks or not missed.is_known or rank in missed.lost:
            self._require_same(request.member)
            decisions = self.roster.attached(rank, request.adopted, now_s)
            self._audience.seat(peer)
            peer.member = request.member
        else:
            decisions = []  # it was let go, and has not heard of it yet
        if missed.changed is not None:
            peer.tell(missed.changed)
        for loss in self.roster.state.vacant:
            peer.tell(m.Presence(loss.rank, "lost", loss.why, loss.where, loss.kind))
        peer.tell(m.Joined(request.id, membership))
        if self.roster.state.over:
            peer.tell(m.Over(self.roster.state.over))
        self._pace.greet(peer)
        self.carry_out(decisions)

    def _require_membership(self) -> Membership:
        if self.membership is None:
            raise RendezvousError("the job is still forming: its first members are not all there")
        return self.membership

    def _require_here(self, rank: int) -> None:
        """Refuse work to one who is not in the job: nobody would notice when it goes."""
        if not self.roster.is_here(rank):
            raise RendezvousError(f"rank {rank} is not in the job, and gets no work of it")

    def _require_same(self, member: Member) -> None:
        """Refuse a process that claims the rank of another one."""
        membership = self._require_membership()
        if member.rank in membership.ranks and member != membership.member(member.rank):
            raise RendezvousError(
                f"rank {member.rank} claimed twice ({membership.member(member.rank).where},"
                f" {member.where}); give every process its own rank"
            )

    def _pass_on(self, event: Event) -> None:
        self._desk.happened(event)
        try:
            if self._on_event is not None:
                self._on_event(event)
        except Exception:  # a watcher's bug must not cost a member its connection
            log.exception("on_event failed for %r", event)

    # -- decisions ---------------------------------------------------------------------------

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        """Write down what was decided, then do it."""
        changes = tuple(d.changed for d in decisions if isinstance(d, Announce))
        self._record.keep(self.roster.state, changes)
        before = self._record.before
        for decision in decisions:
            self._desk.publish(decision)
            if isinstance(decision, Announce):
                self._desk.publish(decision.changed)
                for event in happenings(before, decision.changed):
                    self._desk.happened(event)
                before = decision.changed.membership
                if before.generation == 1 and self.on_membership is not None:
                    self.on_membership(before)
                self._audience.announce(decision.changed)
            elif isinstance(decision, End):
                self._desk.publish(m.Over(decision.why))
                self._audience.end(decision.why)
            elif isinstance(decision, Tell):
                if decision.presence.state in ("lost", "left"):
                    self._store.forget(decision.presence.rank)
                    self._pools.release(decision.presence.rank)
                self._audience.tell(decision.presence)
        if changes:
            self._pace.ask()
        elif decisions:
            self._pace.look()

    async def _watch_members(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            now_s = time.monotonic()
            if self.membership is None:
                self._room.check(now_s, self._audience.peers, self.missing)
            else:
                self.carry_out(self.roster.tick(now_s))
                self._record.shorten()


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the coordinator no longer watches its members", exc_info=task.exception())


def _require_own_rank(peer: Peer, rank: int) -> None:
    if rank != peer.caller.rank:
        raise RendezvousError(
            f"a process authenticated as rank {peer.caller.rank} asked to join as rank {rank}"
        )
