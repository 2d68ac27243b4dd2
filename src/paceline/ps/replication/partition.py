"""One partition in this process: its server, and its place among the copies.

A request for all copies becomes an entry of the replicated log here, and an entry changes the
state of the server; answers that may leave go to its lines. While the server is alone none of
this is needed for the requests of workers (ps/server/server.py).

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
from paceline.ps.replication.replication import Replica
from paceline.ps.replication.snapshot import Filler, restore
from paceline.ps.replication.snapshot_format import Outline
from paceline.ps.server.handlers import again
from paceline.ps.server.server import Asked, Server, Surroundings


class Departed(NamedTuple):
    """Why a worker is not in the job any more."""

    why: str
    has_left: bool = False  # it said so: nobody takes its place


class House(Surroundings, Protocol):
    """What a partition needs of its process."""

    rank: int
    on_loss: str

    def sees(self, peer: int, rank: int) -> bool:
        """Say whether another server sees the memory of a worker."""

    def post(self, peer: int, message: p.AnyMessage, tensors: Sequence[torch.Tensor]) -> None:
        """Send to another server, if there is a line to it."""

    def backlog(self, peer: int) -> int:
        """Say how much that server has not taken yet."""

    def tell_in_sync(self, partition: int, generation: int) -> None:
        """Tell the coordinator that this server has everything of a partition."""

    def departed(self, rank: int) -> Departed | None:
        """Return why a worker is not in the job any more; None: it is, as far as is known."""


class Partition:
    """One copy of a partition, with everything that it needs."""

    def __init__(self, house: House, index: int) -> None:
        self.index = index
        self.seen: tuple[int, bool] | None = None  # the state of things that it last looked at
        self._house = house
        self.replica = Replica(house.rank, self)
        self.server = Server(index, house, self.replica, self.submit)
        self._filler: Filler | None = None

    # -- the loop -----------------------------------------------------------------------------

    def hear(self, sender: int, message: p.AnyMessage, tensors: Sequence[torch.Tensor]) -> None:
        """Take what another server says about this partition."""
        self.replica.receive(sender, peer_wire.decode(message, tensors))
        self.server.bring(self.replica.is_open)

    def flush(self) -> None:
        """Everything that has come is handled: acknowledge it, and go on filling."""
        self.replica.flush()
        for hosted in self.server.hosted:
            hosted.table.note_waits()
        filler, now_s = self._filler, time.monotonic()
        if filler is not None and filler.is_due(now_s, self._house.backlog(filler.peer)):
            filler.send_some(now_s)
            self._filler = None if filler.is_over else filler

    @property
    def is_filling(self) -> bool:
        """Whether another copy is being filled from this one."""
        return self._filler is not None

    # -- requests for all copies --------------------------------------------------------------

    def submit(self, rank: int, op: Asked | p.Event) -> None:
        """Let all copies apply a request, or an event."""
        if isinstance(op, Asked):
            if self.replica.downstream is not None and isinstance(op.request, m.Commit):
                op.late = self._pushed_in_place(rank, op.request)
            self.replica.submit(rank, op.request.seq, op)
        else:
            self.replica.submit(rank, 0, op)

    def _pushed_in_place(self, rank: int, request: m.Commit) -> list[tuple[int, torch.Tensor]]:
        if not 0 <= request.table < len(self.server.hosted):
            return []
        hosted, worker = self.server.hosted[request.table], self.server.callers[rank].worker
        pushed = hosted.table.pending(worker).items()
        return [(n, grad) for n, grad in pushed if hosted.origins.get(("push", worker, n))]

    def drop_broken(self) -> None:
        """Go on without the lines that are of no use any more."""
        while self.server.broken:
            line, error = self.server.broken.pop()
            if self.server.lines.get(line.rank) is not line:
                continue
            if self._house.is_elastic:  # the membership says who is gone
                self.server.hang_up(line.rank)
            else:
                self._lose(line.rank, Departed(str(error)), vacates=False)

    def find_peer_landing(self, message: p.AnyMessage) -> Sequence[torch.Tensor]:
        """Say where the tensors belong that follow a message of another server."""
        return peer_wire.landing(message, self.server, self.replica.index)

    # -- who is there -------------------------------------------------------------------------

    def adopt(self, membership: Membership) -> None:
        """Take the place that a membership gives to this server."""
        filling = membership.filling[self.index] if membership.filling else ()
        self.replica.adopt(membership.generation, membership.holders[self.index], filling)
        if self.replica.role is r.Role.NONE:
            self.server.clear()
            self._filler = None
        self.server.bring(self.replica.is_open)

    def see(self, membership: Membership) -> None:
        """Let the tables know who came and who is gone; only the primary notices by itself."""
        if not self.replica.is_open:
            return
        numbers = membership.worker_numbers
        lines = self.server.lines
        for rank in sorted({*self.server.callers, *lines}):  # one that was muted has only a line
            departed = self._house.departed(rank)
            if departed is not None:
                if rank in lines:
                    self.server.serve_line(lines[rank])  # what it said before its end
                vacates = not departed.has_left and self._is_kept(rank, numbers)
                self._lose(rank, departed, vacates=vacates)
        for rank in membership.workers:
            is_known = rank in self.server.callers or rank in self.server.gone
            if not is_known and self._house.departed(rank) is None:
                number = membership.member(rank).number
                self.submit(rank, p.Entered(rank, number))
        for number in sorted(self.server.vacant - set(numbers)):
            self.submit(self._house.rank, p.Closed(number))

    def _is_kept(self, rank: int, numbers: Sequence[int]) -> bool:
        """Return whether a lost worker's place waits for another one."""
        caller = self.server.callers.get(rank)
        is_held = caller is not None and caller.worker in numbers
        return is_held and self._house.on_loss == "replace"

    def _lose(self, rank: int, departed: Departed, *, vacates: bool) -> None:
        caller = self.server.callers.get(rank)
        if caller is not None:
            self.submit(rank, p.Gone(rank, vacates))
            if not (departed.has_left or self._house.is_elastic):  # else the membership tells
                self._house.say(f"worker {caller.worker} is gone: {departed.why}")
        self.server.hang_up(rank)

    # -- what the replica asks for ------------------------------------------------------------

    def apply(self, entry: r.Entry) -> None:
        op, server = entry.op, self.server
        if isinstance(op, Asked):
            caller = server.callers[entry.rank]
            server.find_tensors(caller, op)
            if entry.again:
                known = self.replica.applied.answer(entry.rank, entry.seq)
                again(server, caller, op.request, known)
            else:
                server.apply(caller, op)
        elif isinstance(op, p.Entered):
            server.enter(op.rank, op.worker)
        elif isinstance(op, p.Gone):
            server.drop(server.callers[op.rank], vacates=op.vacates)
            self.replica.applied.forget(op.rank)
        elif isinstance(op, p.Closed):
            server.close(op.worker)

    def deliver(self, rank: int, seq: int, answer: Any, extra: Any) -> None:
        self.server.deliver(rank, seq, answer, extra or ())

    def send(self, peer: int, message: r.Message) -> None:
        worker = message.entry.rank if isinstance(message, r.Forward) else peer
        sees_worker = self._house.sees(peer, worker)
        if isinstance(message, r.Forward) and isinstance(message.entry.op, Asked):
            # It is passed on before it is applied here, to a copy that may not see the worker.
            caller = self.server.callers.get(worker)
            if caller is not None and not sees_worker:
                self.server.find_tensors(caller, message.entry.op)
        encoded = peer_wire.encode(self.index, message, self.server, sees_worker=sees_worker)
        self._house.post(peer, *encoded)

    def fill(self, peer: int) -> None:
        house = self._house
        self._filler = Filler(self.server, self.replica, peer, lambda rank: house.sees(peer, rank))
        self._filler.send_outline()

    def restore(self, content: Any) -> None:
        part, tensors = content
        if isinstance(part, Outline):
            self.server.clear()
            self.server.bring(False)
        restore(self.server, part, tensors)

    def in_sync(self, generation: int) -> None:
        self._house.tell_in_sync(self.index, generation)
