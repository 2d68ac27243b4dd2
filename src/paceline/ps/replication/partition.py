"""One partition in this process: its server, and its replica among the copies.

A request for all copies becomes an entry of the replicated log here, and an entry changes the state
of the server; answers that may leave go to its connections. A server without backups handles
workers' requests without this (ps/server/server.py).

Threads: none; the loop of the process (ps/server/process.py) calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from paceline.control.member import Membership
from paceline.ps import messages as m
from paceline.ps.replication import chain as r
from paceline.ps.replication import messages as p
from paceline.ps.replication import wire as peer_wire
from paceline.ps.replication.messages import Outline
from paceline.ps.replication.replication import Replica
from paceline.ps.replication.snapshot import SnapshotSender, restore
from paceline.ps.server.handlers import again
from paceline.ps.server.server import Server, ServerContext, ServerRequest
from paceline.ps.server.shard_mover import ShardMover, has_to_move
from paceline.ps.server.worker_memory import NOTHING


class Departed(NamedTuple):
    """Why a worker has left the job."""

    why: str
    has_left: bool = False  # it said goodbye: its slot is not filled again


class PartitionContext(ServerContext, Protocol):
    """What a partition needs from its process."""

    rank: int
    on_loss: str

    def sees(self, peer: int, rank: int) -> bool:
        """Return whether another server sees the memory of a worker."""

    def post(self, peer: int, message: p.AnyMessage, tensors: Sequence[torch.Tensor]) -> None:
        """Send to another server, if it is connected."""

    def backlog(self, peer: int) -> int:
        """Return how many messages that server has not taken yet."""

    def report_in_sync(self, partition: int, generation: int) -> None:
        """Report to the coordinator that this server has everything of a partition."""

    def departed(self, rank: int) -> Departed | None:
        """Return why a worker has left the job; None: it has not, as far as is known."""


class Partition:
    """One copy of a partition, with everything that it needs."""

    def __init__(self, context: PartitionContext, index: int) -> None:
        self.index = index
        self.seen: tuple[int, bool] | None = None  # the state of the process that it last handled
        self._context = context
        self.replica = Replica(context.rank, self)
        self.server = Server(index, context, self.replica, self.submit)
        self._snapshot: SnapshotSender | None = None
        self._mover: ShardMover | None = None
        self._num_looked_at = 0  # tables, whether they have to move

    # -- the loop -----------------------------------------------------------------------------

    def receive(self, sender: int, message: p.AnyMessage, tensors: Sequence[torch.Tensor]) -> None:
        """Handle a message of another server about this partition."""
        self.replica.receive(sender, peer_wire.decode(message, tensors))
        self.server.set_delivering(self.replica.is_open)

    def acknowledge(self) -> None:
        """Acknowledge what was handled: other servers, and their workers, wait for it."""
        self.replica.flush()

    def flush(self) -> None:
        """Acknowledge everything that was handled, and send more of a snapshot."""
        self.replica.flush()
        self.server.settle()
        for served in self.server.tables:
            served.table.note_waits()
        snapshot, now_s = self._snapshot, time.monotonic()
        if snapshot is not None and snapshot.is_due(now_s, self._context.backlog(snapshot.peer)):
            snapshot.send_some(now_s)
            self._snapshot = None if snapshot.is_over else snapshot
        self._move_shards()

    def _move_shards(self) -> None:
        """Move tables that were copied from another server to where workers can map them."""
        if not self.server.is_open:  # a backup's memory is not looked at
            self._num_looked_at = 0
            if self._mover is not None:
                self._mover.stop()
                self._mover = None
        elif self._mover is not None:
            self._mover.advance()
            self._mover = None if self._mover.is_over else self._mover
        elif self._num_looked_at < len(self.server.tables):
            served, context = self.server.tables[self._num_looked_at], self._context
            self._num_looked_at += 1
            if has_to_move(served):
                self._mover = ShardMover(context.engine, context.rank, served, context.log)

    @property
    def is_sending_snapshot(self) -> bool:
        """Whether this copy sends a snapshot to another one."""
        return self._snapshot is not None

    # -- requests for all copies --------------------------------------------------------------

    def submit(self, rank: int, op: ServerRequest | p.Event) -> None:
        """Add a request or an event to the log that all copies apply."""
        if isinstance(op, ServerRequest):
            if self.replica.downstream is not None and isinstance(op.request, m.Commit):
                op.late = self._pushed_in_place(rank, op.request)
            self.replica.submit(rank, op.request.seq, op)
        else:
            self.replica.submit(rank, 0, op)

    def _pushed_in_place(self, rank: int, request: m.Commit) -> list[tuple[int, torch.Tensor]]:
        if not 0 <= request.table < len(self.server.tables):
            return []
        served, worker = self.server.tables[request.table], self.server.callers[rank].worker
        pushed = served.table.pending(worker).items()
        return [(n, grad) for n, grad in pushed if served.origins.get(("push", worker, n))]

    def drop_broken(self) -> None:
        """Drop connections that are broken."""
        while self.server.broken:
            connection, error = self.server.broken.pop()
            if self.server.connections.get(connection.rank) is not connection:
                continue
            if self._context.is_elastic:  # the membership names lost workers
                self.server.hang_up(connection.rank)
            else:
                self._lose(connection.rank, Departed(str(error)), vacates=False)

    def find_peer_landing(self, message: p.AnyMessage) -> Sequence[torch.Tensor]:
        """Return where tensors land that follow a message of another server."""
        return peer_wire.landing(message, self.server, self.replica.index)

    # -- members -------------------------------------------------------------------------

    def adopt(self, membership: Membership) -> None:
        """Take the role that a membership gives to this server."""
        filling = membership.filling[self.index] if membership.filling else ()
        self.replica.adopt(membership.generation, membership.holders[self.index], filling)
        if self.replica.role is r.Role.NONE:
            self.server.clear()
            self._snapshot = None
        self.server.set_delivering(self.replica.is_open)

    def see(self, membership: Membership) -> None:
        """Tell the tables which workers joined and left; only the primary does so."""
        if not self.replica.is_open:
            return
        numbers = membership.worker_numbers
        connections = self.server.connections
        for rank in sorted({*self.server.callers, *connections}):  # a muted worker is no caller
            departed = self._context.departed(rank)
            if departed is not None:
                if rank in connections:
                    self.server.serve_connection(connections[rank])  # what it sent before its end
                vacates = not departed.has_left and self._is_kept(rank, numbers)
                self._lose(rank, departed, vacates=vacates)
        for rank in membership.workers:
            is_known = rank in self.server.callers or rank in self.server.gone
            if not is_known and self._context.departed(rank) is None:
                number = membership.member(rank).number
                self.submit(rank, p.WorkerEntered(rank, number))
        for number in sorted(self.server.vacant - set(numbers)):
            self.submit(self._context.rank, p.SlotClosed(number))

    def _is_kept(self, rank: int, numbers: Sequence[int]) -> bool:
        """Return whether a lost worker's slot waits for a replacement."""
        caller = self.server.callers.get(rank)
        is_held = caller is not None and caller.worker in numbers
        return is_held and self._context.on_loss == "replace"

    def _lose(self, rank: int, departed: Departed, *, vacates: bool) -> None:
        caller = self.server.callers.get(rank)
        if caller is not None:
            self.submit(rank, p.WorkerGone(rank, vacates))
            if not (departed.has_left or self._context.is_elastic):  # else the coordinator logs it
                self._context.log(f"worker {caller.worker} is gone: {departed.why}")
        self.server.hang_up(rank)

    # -- what the replica asks for ------------------------------------------------------------

    def apply(self, entry: r.LogEntry) -> None:
        op, server = entry.op, self.server
        if isinstance(op, ServerRequest):
            caller = server.callers[entry.rank]
            server.find_tensors(caller, op)
            if entry.again:
                known = self.replica.applied.answer(entry.rank, entry.seq)
                again(server, caller, op.request, known)
            else:
                server.apply(caller, op)
        elif isinstance(op, p.WorkerEntered):
            server.enter(op.rank, op.worker)
        elif isinstance(op, p.WorkerGone):
            server.drop(server.callers[op.rank], vacates=op.vacates)
            self.replica.applied.forget(op.rank)
        elif isinstance(op, p.SlotClosed):
            server.close(op.worker)

    def deliver(self, rank: int, seq: int, answer: Any, extra: Any) -> None:
        self.server.deliver(rank, seq, answer, extra or NOTHING)

    def send(self, peer: int, message: r.Message) -> None:
        worker = message.entry.rank if isinstance(message, r.Forward) else peer
        sees_worker = self._context.sees(peer, worker)
        if isinstance(message, r.Forward) and isinstance(message.entry.op, ServerRequest):
            # It is forwarded before it is applied here, to a copy that may not see the worker.
            caller = self.server.callers.get(worker)
            if caller is not None and not sees_worker:
                self.server.find_tensors(caller, message.entry.op)
        encoded = peer_wire.encode(self.index, message, self.server, sees_worker=sees_worker)
        self._context.post(peer, *encoded)

    def fill(self, peer: int) -> None:
        context = self._context
        self._snapshot = SnapshotSender(
            self.server, self.replica, peer, lambda rank: context.sees(peer, rank)
        )
        self._snapshot.send_outline()

    def restore(self, content: Any) -> None:
        part, tensors = content
        if isinstance(part, Outline):
            self.server.clear()
            self.server.set_delivering(False)
        restore(self.server, part, tensors)

    def in_sync(self, generation: int) -> None:
        self._context.report_in_sync(self.index, generation)
