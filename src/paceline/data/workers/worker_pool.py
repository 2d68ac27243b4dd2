"""The data workers that a trainer (or a later stage) requests batches from, and what if one dies.

A request goes to the data worker with the fewest open requests of this client. The batch follows
from the request alone, so the choice only affects the speed. (A stream stays with its data worker.)
A data worker that dies, or is stopped for long, gets no more requests: its open requests go to the
others. If none is left, the client makes the batches itself.

A data worker may reach its loop long after the others. It sets a key in the coordinator's store
when it is ready, and only then is it connected: no client waits for it.

Threads: only the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from paceline import _core
from paceline.comm.fabric import Fabric
from paceline.control.client.rendezvous import AnyAgent
from paceline.control.member import Member
from paceline.control.wait_notice import FIRST_S, WaitNotice
from paceline.data.workers import messages as m
from paceline.data.workers.connection import DataWorkerConnection, IncomingBatch, form
from paceline.errors import PacelineError, PeerError, PeerLost
from paceline.runtime.console import say

_CONNECT_S = 0.02  # poll interval for data workers that are not ready yet
_EVERY_S = 30.0


@dataclass(eq=False)
class PendingBatch:
    """A request under way. Without a connection: no data worker is ready yet, or none is left."""

    request: m.BatchRequest
    connection: DataWorkerConnection | None = None
    incoming: IncomingBatch | None = None

    @property
    def has_arrived(self) -> bool:
        return self.incoming is not None and self.incoming.work.done()


@dataclass(frozen=True)
class ReceivedReply:
    """A reply, the connection that it came from, and the memory with its tensors."""

    reply: m.BatchReply
    connection: DataWorkerConnection
    memory: torch.Tensor | None


class DataWorkerPool:
    """The data workers of one stage, as one client sees them."""

    def __init__(
        self, fabric: Fabric, agent: AnyAgent, members: Sequence[Member], *, is_first_stage: bool
    ) -> None:
        self._fabric, self._is_first_stage = fabric, is_first_stage
        self.pins_memory = False  # batches from other hosts go to pinned memory
        self._connections: list[DataWorkerConnection] = []
        self._agent = agent
        self._connecting = {member.rank: member for member in members}  # not ready yet
        self._next_poll_s = 0.0
        self._pending: list[PendingBatch] = []
        self._abandoned: list[PendingBatch] = []
        self._quiet_until_s = 0.0
        self._turn = fabric.rank  # so that clients do not all start with the same data worker

    @property
    def is_empty(self) -> bool:
        """Whether no data worker is left, and none will join."""
        return not self._connections and not self._connecting

    def send(self, request: m.BatchRequest) -> PendingBatch:
        """Send a request to a data worker."""
        self.poll()
        pending = PendingBatch(request)
        self._pending.append(pending)
        self._assign(pending)
        return pending

    def poll(self) -> None:
        """Connect to data workers that have become ready, and send requests that wait for one."""
        self._release_abandoned()
        if self._connecting and time.monotonic() >= self._next_poll_s:
            for member in list(self._connecting.values()):
                self._connect(member)
            self._next_poll_s = time.monotonic() + _CONNECT_S
        if self._connections:
            for pending in self._pending:
                if pending.connection is None:
                    self._assign(pending)

    def _connect(self, member: Member) -> None:
        """Connect to a data worker if it is ready; drop it if it is lost."""
        presence = self._fabric.presence.get(member.rank)
        try:
            if presence is not None and presence.state in ("left", "lost"):
                raise PeerLost(presence.text, rank=member.rank)
            if not self._agent.store_check([ready_key(member.rank)]):
                return
            group = form(self._fabric, member, self._fabric.me)
        except PeerError as error:
            del self._connecting[member.rank]
            self._log_lost(member, error)
            return
        del self._connecting[member.rank]
        made = DataWorkerConnection(self._fabric, member, group, pins=lambda: self.pins_memory)
        self._connections.append(made)

    def take(self, pending: PendingBatch) -> ReceivedReply | None:
        """Return the reply that has arrived; None if its data worker is lost, and the request was
        sent to another."""
        connection, incoming = pending.connection, pending.incoming
        assert connection is not None and incoming is not None
        try:
            incoming.work.wait()
            reply, memory = connection.read(incoming)
        except PeerError as error:
            self._lose(connection, error)
            return None
        connection.outstanding -= 1
        self._pending.remove(pending)
        return ReceivedReply(reply, connection, memory)

    def wait(self, pending: PendingBatch) -> ReceivedReply | None:
        """Wait for the reply; None if no data worker is left."""
        notice = WaitNotice("", "the next batch")
        while not self.is_empty:
            start_s = time.monotonic()
            if pending.incoming is None:
                _pause(self._pending)
            elif pending.has_arrived or _wait_any([pending], FIRST_S):
                received = self.take(pending)
                if received is not None:
                    return received
            self.poll()
            notice.ranks = (
                (pending.connection.member.rank,) if pending.connection is not None else ()
            )
            notice.check()
            self._log_slow(time.monotonic() - start_s)
        self._pending.remove(pending)
        return None

    def _log_slow(self, waited_s: float) -> None:
        """Log that data workers are slow, at most every 30 s."""
        now_s = time.monotonic()
        if waited_s >= FIRST_S and now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _EVERY_S
            say(
                f"rank {self._fabric.rank} waits for its data workers; {len(self._connections)}"
                " make batches for it; start more data workers, or make the dataset cheaper"
            )

    def abandon(self, pending: PendingBatch) -> None:
        """Drop the reply to a request when it arrives."""
        self._abandoned.append(pending)

    def _assign(self, pending: PendingBatch) -> None:
        while (connection := self._choose(pending.request)) is not None:

            def make(seq: int, released: tuple[int, ...], room: int) -> m.BatchRequest:
                return msgspec.structs.replace(
                    pending.request, seq=seq, released=released, room=room
                )

            try:
                pending.incoming = connection.send(make)
                pending.connection = connection
                return
            except PeerError as error:
                self._lose(connection, error)

    def _choose(self, request: m.BatchRequest) -> DataWorkerConnection | None:
        """Return the data worker for a request; None if none is ready or left."""
        if request.stream is None or not self._is_first_stage:
            self._turn += 1
            first = self._turn % max(1, len(self._connections))
            turned = self._connections[first:] + self._connections
            return min(turned, key=lambda connection: connection.outstanding, default=None)
        # A stream is read in sequence: one data worker reads it for a trainer, if possible.
        ready = {connection.member.number: connection for connection in self._connections}
        numbers = sorted([*ready, *(member.number for member in self._connecting.values())])
        return ready.get(numbers[request.stream[1] % len(numbers)]) if numbers else None

    def _release_abandoned(self) -> None:
        """Return the slots of abandoned replies."""
        for pending in [
            one for one in self._abandoned if one.has_arrived or one.connection is None
        ]:
            self._abandoned.remove(pending)
            if pending.connection is None:
                self._pending.remove(pending)
            elif self.take(pending) is None:
                self._abandoned.append(pending)

    def _lose(self, connection: DataWorkerConnection, error: PacelineError) -> None:
        """Drop a data worker, and send its open requests to others."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        connection.close()
        orphans = [pending for pending in self._pending if pending.connection is connection]
        for pending in orphans:
            pending.connection = pending.incoming = None
            if pending in self._abandoned:
                self._abandoned.remove(pending)
                self._pending.remove(pending)
        orphans = [pending for pending in orphans if pending in self._pending]
        self._log_lost(connection.member, error, len(orphans))
        for pending in orphans:
            self._assign(pending)

    def _log_lost(self, member: Member, error: PacelineError, num_orphans: int = 0) -> None:
        left = len(self._connections) + len(self._connecting)
        what = f"data worker {member.number} ({member.where}) is lost"
        if left:
            then = f"{left} left" + (
                f", which get its {num_orphans} requests" if num_orphans else ""
            )
        else:
            then = "NONE IS LEFT: this process makes its batches itself from now on, more slowly"
        say(f"rank {self._fabric.rank}: {what}: {then} ({type(error).__name__})")


def ready_key(rank: int) -> str:
    """Return the store key that a data worker sets when it is ready."""
    return f"paceline/data worker {rank}"


def _pause(pending: Sequence[PendingBatch]) -> None:
    """Wait a little for a data worker to become ready, or for a reply."""
    if any(one.incoming is not None for one in pending):
        _wait_any(pending, _CONNECT_S)
    else:
        time.sleep(_CONNECT_S)


def _wait_any(pending: Sequence[PendingBatch], timeout_s: float) -> bool:
    """Wait for any of the replies; return whether one has arrived."""
    handles: list[Any] = [p.incoming.work.handle for p in pending if p.incoming is not None]
    return _core.wait_any(handles, timeout_s) >= 0
