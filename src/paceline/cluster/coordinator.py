"""The coordinator: the one place that knows who is in the job.

It admits members, waits until every rank has joined, announces the membership, keeps the store,
passes events on, and tells everybody when a member is lost, left, or has gone silent. It never
touches tensors: while it is away training goes on, but nobody can join.

Silence is told apart from loss. A lost member's connection ended without a Leave: its process is
gone. A silent one has sent no heartbeat for `liveness_s`; it may be stopped or starved, and may
come back.

Threads: everything runs in the asyncio loop that called `start` (the launcher's, or
`CoordinatorThread`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

import msgspec

from paceline.cluster import messages as m
from paceline.cluster.assembly import Assembly
from paceline.cluster.auth import Hello, Session
from paceline.cluster.channel import Channel
from paceline.cluster.gate import Gate
from paceline.cluster.loop_thread import LoopThread
from paceline.cluster.member import Membership
from paceline.cluster.peer import Peer
from paceline.cluster.sockets import join_address, listen_tcp
from paceline.cluster.store_service import StoreService
from paceline.errors import PacelineError, RendezvousError
from paceline.telemetry.events import Event

_CHECK_S = 0.25
_NOTICE_S = 2.0

log = logging.getLogger("paceline.cluster")
_decoder = msgspec.msgpack.Decoder(m.MemberMessage)


class Coordinator:
    """Serves one job. `on_event` is called in the loop for every event that a member reports."""

    def __init__(
        self,
        job_id: str,
        secret: bytes,
        world_size: int,
        join_timeout_s: float = 60.0,
        on_event: Callable[[Event], None] | None = None,
        *,
        liveness_s: float = 5.0,
    ) -> None:
        self._join_timeout_s, self._liveness_s = join_timeout_s, liveness_s
        self._on_event = on_event
        self.on_membership: Callable[[Membership], None] | None = None  # called in the loop
        self._assembly = Assembly(world_size)
        self._store = StoreService()
        self._gate = Gate(secret, job_id=job_id, listener=m.COORDINATOR, admit=self._admit)
        self._peers: set[Peer] = set()
        self._failure: RendezvousError | None = None
        self._first_join_s = self._notice_s = self._deadline_s = 0.0  # set by the first to join
        self._watch: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}  # rank -> what is known about it

    @property
    def membership(self) -> Membership | None:
        """The announced membership; None while ranks are missing."""
        return self._assembly.membership

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not joined yet."""
        return self._assembly.missing

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen and serve; return "host:port"."""
        listener = listen_tcp(host, port)
        self._gate.open(listener)
        self._watch = asyncio.ensure_future(self._watch_members())
        return join_address(host, listener.getsockname()[1])

    async def stop(self) -> None:
        """End all connections. Members go on without a coordinator."""
        self._is_stopping = True
        if self._watch is not None:
            self._watch.cancel()
        await self._gate.close()

    async def wait_until_alone(self, timeout_s: float) -> None:
        """Wait until every member has left or was lost, at most so long."""
        deadline = time.monotonic() + timeout_s
        while self._peers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _admit(self, sock: socket.socket, session: Session, caller: Hello) -> None:
        peer = Peer(await Channel.over(sock, session, _decoder), caller)
        self._peers.add(peer)
        reason = "its connection ended"
        try:
            while not peer.has_left:
                message = await peer.channel.receive()
                peer.last_seen_s = time.monotonic()
                self._on_message(peer, message)
        except (EOFError, OSError) as error:
            log.debug("rank %d: connection ended: %r", caller.rank, error)
        except PacelineError as error:
            reason = str(error)
        finally:
            self._peers.discard(peer)
            peer.channel.close()
            self._dismiss(peer, reason)

    def _on_message(self, peer: Peer, message: m.MemberMessage) -> None:
        if peer.is_silent:
            peer.is_silent = False
            self._broadcast(peer, "back", "it sends heartbeats again")
        if isinstance(message, m.Join):
            self._on_join(peer, message)
        elif isinstance(message, m.Report):
            self._pass_on(message.event)
        elif isinstance(message, m.Leave):
            peer.has_left = True
        elif isinstance(message, m.Request):
            forget = self._store.handle(message, lambda value: peer.answer(message.id, value))
            if forget is not None:
                peer.waits[message.id] = forget

    def _pass_on(self, event: Event) -> None:
        try:
            if self._on_event is not None:
                self._on_event(event)
        except Exception:  # a watcher's bug must not cost a member its connection
            log.exception("on_event failed for %r", event)

    def _on_join(self, peer: Peer, request: m.Join) -> None:
        try:
            self._seat(peer, request)
        except RendezvousError as error:
            peer.answer(request.id, error)
            return
        membership = self._assembly.membership
        if membership is not None:
            if self.on_membership is not None:
                self.on_membership(membership)
            for other in self._peers:
                if other.join is not None:
                    other.tell(m.Joined(other.join.id, membership))

    def _seat(self, peer: Peer, request: m.Join) -> None:
        if self._failure is not None:
            raise self._failure
        if request.member.rank != peer.caller.rank:
            raise RendezvousError(
                f"a process authenticated as rank {peer.caller.rank} asked to join as rank"
                f" {request.member.rank} ({request.member.where})"
            )
        is_first = len(self.missing) == self._assembly.world_size
        self._assembly.add(request.member)
        peer.member, peer.join = request.member, request
        now_s = time.monotonic()
        deadline_s = now_s + min(request.timeout_s, self._join_timeout_s)
        if is_first:
            self._first_join_s, self._deadline_s = now_s, deadline_s
            self._notice_s = now_s + _NOTICE_S
        self._deadline_s = min(self._deadline_s, deadline_s)

    def _dismiss(self, peer: Peer, reason: str) -> None:
        """Forget a connection that ended, and tell the others if a member went with it."""
        for forget in list(peer.waits.values()):
            forget()
        if peer.member is None or self._is_stopping:
            return
        rank = peer.member.rank
        if self.membership is None:
            self._assembly.remove(rank)
        elif peer.has_left:
            self.left.add(rank)
            self._broadcast(peer, "left", "it ended in good order")
        else:
            self.lost[rank] = f"{peer.member.where}: {reason}"
            self._broadcast(peer, "lost", self.lost[rank])

    def _broadcast(self, about: Peer, state: str, detail: str) -> None:
        if about.member is None:
            return
        for peer in self._peers:
            if peer is not about and peer.member is not None:
                peer.tell(m.Presence(about.member.rank, state, detail))

    async def _watch_members(self) -> None:
        previous_s = time.monotonic()
        while True:
            await asyncio.sleep(_CHECK_S)
            now_s = time.monotonic()
            if now_s - previous_s > 4 * _CHECK_S:
                # This process itself was stopped or starved: heartbeats may wait unread in the
                # sockets, so nobody can be blamed for the time that passed.
                for peer in self._peers:
                    peer.last_seen_s += now_s - previous_s
            previous_s = now_s
            if self.membership is None:
                self._check_join(now_s)
            else:
                self._check_silence(now_s)

    def _check_join(self, now_s: float) -> None:
        """Say who is missing; give up for all when the first of the waiting runs out of time."""
        waiting = sorted((p for p in self._peers if p.join), key=lambda p: p.caller.rank)
        if not waiting:
            return
        waited_s = now_s - self._first_join_s
        if now_s >= self._deadline_s:
            self._failure = RendezvousError(
                f"waited {waited_s:.0f} s for ranks {list(self.missing)} of"
                f" {self._assembly.world_size} to join; see why they did not start, or raise"
                " PACELINE_JOIN_TIMEOUT_S"
            )
            for peer in waiting:
                assert peer.join is not None
                peer.answer(peer.join.id, self._failure)
                peer.join = None
        elif now_s >= self._notice_s:
            self._notice_s = now_s + 5 * _NOTICE_S
            if waiting[0].caller.role == "worker":  # one line per job; servers wait by nature
                waiting[0].tell(m.Missing(self.missing, waited_s))

    def _check_silence(self, now_s: float) -> None:
        for peer in list(self._peers):
            silent_s = now_s - peer.last_seen_s
            if silent_s > self._liveness_s and not peer.is_silent:
                peer.is_silent = True
                self._broadcast(peer, "silent", f"no heartbeat for {silent_s:.1f} s")


class CoordinatorThread:
    """A coordinator in a thread of its own, for rank 0 of a job that another launcher started."""

    def __init__(
        self,
        job_id: str,
        secret: bytes,
        world_size: int,
        join_timeout_s: float = 60.0,
        on_event: Callable[[Event], None] | None = None,
        *,
        liveness_s: float = 5.0,
    ) -> None:
        self._thread = LoopThread("paceline-coordinator")
        self.coordinator = Coordinator(
            job_id,
            secret,
            world_size,
            join_timeout_s,
            on_event,
            liveness_s=liveness_s,
        )

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; return "host:port". The thread ends when that fails."""
        try:
            return self._thread.call(self.coordinator.start(host, port))
        except PacelineError:
            self._thread.stop()
            raise

    def stop(self, grace_s: float = 0.0) -> None:
        """Give the members `grace_s` to leave, then end. May be called twice."""
        if self._thread.is_running:
            self._thread.call(self.coordinator.wait_until_alone(grace_s))
            self._thread.call(self.coordinator.stop())
            self._thread.stop()
