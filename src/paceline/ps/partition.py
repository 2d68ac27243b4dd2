"""One partition in this process: a copy of its tables, its lines, and its place among the copies.

Here requests that come on lines become entries of the replicated log, and answers that may leave
become frames. Everything between the two is the state of `Server`, the same on all copies.

Threads: none; the loop of the process (hosting.py) calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
import torch

from paceline.cluster.member import Membership
from paceline.errors import BadFrame, PeerError, ProtocolError
from paceline.ps import messages as m
from paceline.ps import peer_messages as p
from paceline.ps import peer_wire
from paceline.ps import replication as r
from paceline.ps.line import Arrival, Landing, Line
from paceline.ps.load import Load
from paceline.ps.server import Asked, Server, Surroundings
from paceline.ps.snapshot import Filler, restore
from paceline.ps.snapshot_form import Outline
from paceline.work import Work

LEFT = "it left"  # why a worker is gone that said so


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

    def why_gone(self, rank: int) -> str | None:
        """Say why a worker is not in the job any more; None: it is, as far as is known."""


class Partition:
    """One copy of a partition, with everything that it needs."""

    def __init__(self, house: House, index: int) -> None:
        self.index = index
        self.lines: dict[int, Line] = {}  # by the worker's rank
        self.load = Load()
        self.seen: tuple[int, bool] | None = None  # the state of things that it last looked at
        self._house = house
        self.replica = r.Replica(house.rank, self)
        self.server = Server(index, house, self.replica.answer)
        self._filler: Filler | None = None
        self._broken: list[tuple[Line, PeerError]] = []
        self._leaving: dict[int, int] = {}  # by rank: the number of its Leave

    # -- the loop -----------------------------------------------------------------------------

    def works(self) -> Iterator[Work[Any]]:
        """What this partition waits for."""
        if self.replica.is_open:
            for line in self.lines.values():
                yield from line.works()

    def serve(self) -> None:
        """Handle what has come from workers."""
        if self.replica.is_open:
            for line in list(self.lines.values()):
                self._serve(line)
        self._drop_broken()

    def hear(self, sender: int, message: p.AnyMessage, tensors: Sequence[torch.Tensor]) -> None:
        """Take what another server says about this partition."""
        self.replica.receive(sender, peer_wire.decode(message, tensors))
        self.server.bring(self.replica.is_open)

    def flush(self) -> None:
        """Everything that has come is handled: acknowledge it, and go on filling."""
        self.replica.flush()
        filler, now_s = self._filler, time.monotonic()
        if filler is not None and filler.is_due(now_s, self._house.backlog(filler.peer)):
            filler.send_some(now_s)
            self._filler = None if filler.is_over else filler

    @property
    def is_filling(self) -> bool:
        """Whether another copy is being filled from this one."""
        return self._filler is not None

    # -- requests -----------------------------------------------------------------------------

    def _serve(self, line: Line) -> None:
        try:
            for arrival in line.arrivals(self._find_landing):
                self._take(line, arrival)
                if self.lines.get(line.rank) is not line:
                    return
        except BadFrame as error:
            self._mute(line, error)
        except PeerError as error:
            self._broken.append((line, error))

    def _take(self, line: Line, arrival: Arrival) -> None:
        started_s, request = time.perf_counter(), arrival.request
        caller = self.server.callers.get(line.rank)
        if caller is None:  # it was dropped; a Leave may still come
            refused = "" if isinstance(request, m.Leave) else ProtocolError.__name__
            line.reply(m.Reply(request.seq, error=refused, text="this worker counts as gone"))
            return
        asked = Asked(request, arrival.tensors, arrival.refusal)
        if self.replica.downstream is not None and isinstance(request, m.Commit):
            asked.late = self._pushed_in_place(caller.worker, request)
        self.replica.submit(line.rank, request.seq, asked)
        self.load.requests += 1
        for tensor in arrival.tensors:
            self.load.num_bytes += tensor.nbytes
        self.load.busy_s += time.perf_counter() - started_s

    def _pushed_in_place(self, worker: int, request: m.Commit) -> list[tuple[int, torch.Tensor]]:
        if not 0 <= request.table < len(self.server.hosted):
            return []
        hosted = self.server.hosted[request.table]
        pushed = hosted.table.pending(worker).items()
        return [(n, grad) for n, grad in pushed if hosted.origins.get(("push", worker, n))]

    def _mute(self, line: Line, error: BadFrame) -> None:
        """Go on without a worker that says what cannot be read: nobody knows what it wanted."""
        caller = self.server.callers.get(line.rank)
        who = line.rank if caller is None else caller.worker
        said = f"has stopped listening to worker {who}: {error}"
        self._house.say(said)
        if caller is not None:
            self.replica.submit(line.rank, 0, p.Gone(line.rank))
        try:
            line.mute(
                f"server {self.index} {said}. Do all processes run the same version of Paceline?"
            )
        except PeerError as lost:
            self._broken.append((line, lost))

    def _drop_broken(self) -> None:
        while self._broken:
            line, error = self._broken.pop()
            if self.lines.get(line.rank) is not line:
                continue
            if self._house.is_elastic:  # the membership says who is gone
                self.hang_up(line.rank)
            else:
                self._lose(line.rank, str(error), vacates=False)

    def _find_landing(self, line: Line, request: m.AnyRequest) -> Landing:
        caller = self.server.callers.get(line.rank)
        if caller is None:
            return Landing()
        return self.server.find_landing(caller, request, is_sent=False)

    def find_peer_landing(self, message: p.AnyMessage) -> Sequence[torch.Tensor]:
        """Say where the tensors belong that follow a message of another server."""
        return peer_wire.landing(message, self.server, self.replica.index)

    # -- who is there -------------------------------------------------------------------------

    def adopt(self, membership: Membership) -> None:
        """Take the place that a membership gives to this server."""
        filling = membership.filling[self.index] if membership.filling else ()
        self.replica.adopt(membership.generation, membership.holders[self.index], filling)
        if self.replica.role is r.Role.NONE:
            self.server = Server(self.index, self._house, self.replica.answer)
            self._filler = None
        self.server.bring(self.replica.is_open)

    def see(self, membership: Membership) -> None:
        """Let the tables know who came and who is gone; only the primary notices by itself."""
        if not self.replica.is_open:
            return
        numbers = membership.worker_numbers
        for rank in sorted(
            {*self.server.callers, *self.lines}
        ):  # one that was muted has only a line
            why = self._house.why_gone(rank)
            if why is not None:
                if rank in self.lines:
                    self._serve(self.lines[rank])  # what it said before its end
                self._lose(rank, why, vacates=self._is_kept(rank, why, numbers))
        for rank in membership.workers:
            is_known = rank in self.server.callers or rank in self.server.gone
            if not is_known and self._house.why_gone(rank) is None:
                number = membership.member(rank).number
                self.replica.submit(rank, 0, p.Entered(rank, number))
        for number in sorted(self.server.vacant - set(numbers)):
            self.replica.submit(self._house.rank, 0, p.Closed(number))

    def _is_kept(self, rank: int, why: str, numbers: Sequence[int]) -> bool:
        """Say whether a worker's place waits for another one."""
        caller = self.server.callers.get(rank)
        is_held = caller is not None and caller.worker in numbers
        return is_held and why != LEFT and self._house.on_loss == "replace"

    def _lose(self, rank: int, why: str, *, vacates: bool) -> None:
        caller = self.server.callers.get(rank)
        if caller is not None:
            self.replica.submit(rank, 0, p.Gone(rank, vacates))
            if why != LEFT and not self._house.is_elastic:  # else the membership tells
                self._house.say(f"worker {caller.worker} is gone: {why}")
        self.hang_up(rank)

    def hang_up(self, rank: int) -> None:
        """End the line to a worker."""
        line = self.lines.pop(rank, None)
        self._leaving.pop(rank, None)
        if line is not None:
            line.close()

    # -- what the replica asks for ------------------------------------------------------------

    def apply(self, entry: r.Entry) -> None:
        op, server = entry.op, self.server
        if isinstance(op, Asked):
            caller = server.callers[entry.rank]
            server.find_tensors(caller, op)
            if entry.again:
                known = self.replica.remembered(entry.rank, entry.seq)
                server.handle_again(caller, op, known)
                return
            if isinstance(op.request, m.Leave):
                self._leaving[entry.rank] = entry.seq
            server.handle(caller, op)
            if isinstance(op.request, m.Leave):
                self.replica.forget(entry.rank)
        elif isinstance(op, p.Entered):
            server.enter(op.rank, op.worker)
        elif isinstance(op, p.Gone):
            server.drop(server.callers[op.rank], vacates=op.vacates)
            self.replica.forget(op.rank)
        elif isinstance(op, p.Closed):
            server.close(op.worker)

    def deliver(self, rank: int, seq: int, answer: Any, extra: Any) -> None:
        line = self.lines.get(rank)
        if line is None:
            return
        if extra:
            answer = msgspec.structs.replace(answer, delivers=True)
        try:
            line.reply(answer, extra or ())
        except PeerError as error:
            self._broken.append((line, error))
        if self._leaving.get(rank) == seq:
            self.hang_up(rank)

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
            self.server = Server(self.index, self._house, self.replica.answer)
            self.server.bring(False)
        restore(self.server, part, tensors)

    def in_sync(self, generation: int) -> None:
        self._house.tell_in_sync(self.index, generation)
