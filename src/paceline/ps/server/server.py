"""One server's copy of a partition: its lines, its tables, and what it does with a request.

    an arrival -> its handler changes a table -> whoever waited for that change is answered

Requests come one after the other, so every table sees its requests one after the other, and a
reader never sees half of an update (large ones are computed by a few threads, cache_blocks.py). The
requests of a step are in table_requests.py, all others in handlers.py, the mathematics in table.py.

A copy that is ALONE applies a request as it comes, and answers it. Where there are more, a request
becomes an entry of the log that all of them apply in the same order (ps/replication/partition.py,
ps/replication/replication.py), and its answer leaves when all have it.

A worker that is gone is dropped: what it pushed without committing is gone, the others no longer
wait for it; or its place stays vacant until another one takes it over.

Threads: none; the loop of the process (process.py) calls.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from paceline import _core
from paceline.errors import BadFrame, PacelineError, PeerError, ProtocolError, UnknownKey
from paceline.observe.telemetry.trace import tracer
from paceline.ps import messages as m
from paceline.ps.connection import Landing, RequestArrival, WorkerConnection
from paceline.ps.replication import messages as p
from paceline.ps.replication.applied import REMEMBERED
from paceline.ps.replication.replication import Replica
from paceline.ps.server.handlers import HANDLERS
from paceline.ps.server.table_requests import STEP, Hosted
from paceline.ps.server.telemetry import Load, ServerSpans
from paceline.ps.server.worker_memory import Caller
from paceline.ps.state_wire import landing


@dataclass
class Asked:
    """A request, its tensors, or why those cannot be had."""

    request: m.AnyRequest
    tensors: Sequence[torch.Tensor] = ()
    refusal: PacelineError | None = None
    # With a commit: what was pushed and is read in place, for copies that cannot do so.
    late: Sequence[tuple[int, torch.Tensor]] = ()
    how: str = (
        ""  # on a backup, until its turn: how it gets the tensors; see ps/replication/wire.py
    )


class Surroundings(Protocol):
    """What a copy needs to know of its process."""

    @property
    def engine(self) -> _core.Engine: ...
    @property
    def is_elastic(self) -> bool: ...
    def is_here(self, rank: int) -> bool:
        """Return whether a process is on this host."""

    def say(self, text: str) -> None:
        """Tell whoever watches the job."""


class Server:
    """The tables of one partition, and who uses them."""

    num_workers = 0  # in a job that does not change

    def __init__(
        self,
        index: int,
        surroundings: Surroundings,
        replica: Replica,
        share: Callable[[int, Asked | p.Event], None],
    ) -> None:
        """`share(rank, ...)` lets all copies apply a request of a worker, or an event."""
        self.index = index
        self.surroundings = surroundings
        self.lines: dict[int, WorkerConnection] = {}  # by the worker's rank
        self.broken: list[
            tuple[WorkerConnection, PeerError]
        ] = []  # lines that are of no use any more
        self.load = Load()
        self.callers: dict[int, Caller] = {}  # by rank
        self.gone: set[int] = set()  # ranks that will not come back
        self.hosted: list[Hosted] = []  # by number
        self.by_name: dict[str, Hosted] = {}
        self.brings = True  # values to workers: this copy is the primary
        self._replica, self._applied, self._share = replica, replica.applied, share
        self._leaving: dict[int, int] = {}  # by rank: the number of its Leave
        self._spans = ServerSpans()

    def clear(self) -> None:
        """Have no tables, and know nobody."""
        for memory in (self.callers, self.gone, self.hosted, self.by_name):
            memory.clear()

    # -- lines --------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether workers are listened to."""
        return self._replica.is_alone or self._replica.is_open

    def works(self) -> Iterator[_core.Work]:
        """Yield what this copy waits for from workers."""
        if self.is_open:
            for line in self.lines.values():
                yield from line.works()

    def serve(self) -> None:
        """Handle what has come from workers."""
        if self.is_open:
            for line in list(self.lines.values()):
                self.serve_line(line)

    def serve_line(self, line: WorkerConnection) -> None:
        """Handle what has come from one worker."""
        try:
            for arrival in line.arrivals(self._find_landing):
                self._take(line, arrival)
                if self.lines.get(line.rank) is not line:
                    return
        except BadFrame as error:
            self._mute(line, error)
        except PeerError as error:
            self.broken.append((line, error))

    def _take(self, line: WorkerConnection, arrival: RequestArrival) -> None:
        started_s, request = time.perf_counter(), arrival.request
        if line.rank not in self.callers:  # it was dropped; a Leave may still come
            refused = "" if isinstance(request, m.Leave) else ProtocolError.__name__
            line.reply(m.Reply(request.seq, error=refused, text="this worker counts as gone"))
            return
        self.take(line.rank, Asked(request, arrival.tensors, arrival.refusal))
        self.load.requests += 1
        for tensor in arrival.tensors:
            self.load.num_bytes += tensor.nbytes
        self.load.busy_s += time.perf_counter() - started_s

    def take(self, rank: int, asked: Asked) -> None:
        """Apply a new request at once if this copy is alone; else it is for all of them."""
        client, seq = self._applied.clients.get(rank), asked.request.seq
        if not self._replica.is_alone or client is None or seq <= client.last:
            self._share(rank, asked)  # there it is known what was answered before
            return
        client.last = seq
        self._applied.index += 1
        self.apply(self.callers[rank], asked)

    def _find_landing(self, line: WorkerConnection, request: m.AnyRequest) -> Landing:
        caller = self.callers.get(line.rank)
        return Landing() if caller is None else self.find_landing(caller, request, is_sent=False)

    def _mute(self, line: WorkerConnection, error: BadFrame) -> None:
        """Go on without a worker that says what cannot be read: nobody knows what it wanted."""
        caller = self.callers.get(line.rank)
        who = line.rank if caller is None else caller.worker
        said = f"has stopped listening to worker {who}: {error}"
        self.surroundings.say(said)
        if caller is not None:
            self._share(line.rank, p.Gone(line.rank))
        try:
            line.mute(
                f"server {self.index} {said}. Do all processes run the same version of Paceline?"
            )
        except PeerError as lost:
            self.broken.append((line, lost))

    def deliver(
        self, rank: int, seq: int, reply: m.Reply, deliveries: Sequence[torch.Tensor]
    ) -> None:
        """Send an answer to a worker, if there is a line to it."""
        line = self.lines.get(rank)
        if line is None:
            return
        if deliveries:
            reply = msgspec.structs.replace(reply, delivers=True)
        try:
            line.reply(reply, deliveries)
        except PeerError as error:
            self.broken.append((line, error))
        if self._leaving and self._leaving.get(rank) == seq:
            self.hang_up(rank)

    def hang_up(self, rank: int) -> None:
        """End the line to a worker."""
        line = self.lines.pop(rank, None)
        self._leaving.pop(rank, None)
        if line is not None:
            line.close()

    # -- requests -----------------------------------------------------------------------------

    def apply(self, caller: Caller, asked: Asked) -> None:
        """Handle a request, the same on every copy."""
        is_last = isinstance(asked.request, m.Leave)
        if is_last:
            self._leaving[caller.rank] = asked.request.seq
        if tracer.is_planned and self.brings:
            self._handle_traced(caller, asked)
        else:
            self._handle(caller, asked)
        if is_last:
            self._applied.forget(caller.rank)

    def _handle_traced(self, caller: Caller, asked: Asked) -> None:
        request, num_bytes = asked.request, sum(tensor.nbytes for tensor in asked.tensors)
        with self._spans.handling(caller, request, num_bytes):
            self._handle(caller, asked)
            if isinstance(request, m.Push) and not self._is_averaged(request):
                self._spans.unanswered(caller, request.seq)

    def _is_averaged(self, push: m.Push) -> bool:
        is_known = 0 <= push.table < len(self.hosted)
        return is_known and self.hosted[push.table].table.spec.rule.aggregate

    def _handle(self, caller: Caller, asked: Asked) -> None:
        request = asked.request
        try:
            if asked.refusal is not None:
                raise asked.refusal
            step = STEP.get(type(request))
            if step is not None:
                step(self.find(request.table), caller, request, asked.tensors)  # type: ignore[union-attr]
            else:
                HANDLERS[type(request)](self, caller, request, asked.tensors)
        except PacelineError as error:
            self.refuse(caller, request, error)
        except Exception as error:  # a request must not take the other workers' server with it
            traceback.print_exc()
            what = f"{type(request).__name__} of worker {caller.worker}: {error!r:.200}"
            text = f"server {self.index} cannot handle {what}; its own output says where"
            self.refuse(caller, request, ProtocolError(text))

    def find_tensors(self, caller: Caller, asked: Asked) -> None:
        """On a backup, when it is a request's turn: get hold of what was not sent with it."""
        how, asked.how, request = asked.how, "", asked.request
        if how:
            asked.tensors = self.find_landing(caller, request, is_sent=how == "late").tensors
        if asked.late and isinstance(request, m.Commit) and not self.brings:
            table = self.find(request.table).table
            for shard, grad in asked.late:
                table.renew(caller.worker, shard, grad)

    def refuse(self, caller: Caller, request: m.AnyRequest, error: PacelineError) -> None:
        """Answer with an error; a push that nobody waits for is refused with its commit."""
        if isinstance(request, m.Push) and 0 <= request.table < len(self.hosted):
            hosted = self.hosted[request.table]
            if not hosted.table.spec.rule.aggregate:
                hosted.refusals.setdefault(caller.worker, error)
                return
        self.answer(caller, request.seq, error=type(error).__name__, text=str(error))

    def answer(
        self, caller: Caller, seq: int, deliveries: Sequence[torch.Tensor] = (), **fields: Any
    ) -> None:
        """Answer a request; tensors follow if the worker is on another host."""
        if tracer.is_planned:
            self._spans.answered(caller, seq)
        self.repeat(caller, m.Reply(seq, **fields), deliveries)

    def repeat(
        self, caller: Caller, reply: m.Reply, deliveries: Sequence[torch.Tensor] = ()
    ) -> None:
        """Give an answer, which may have been given before; it leaves when all copies have it."""
        if not self._replica.is_alone:
            self._replica.answer(caller.rank, reply.seq, reply, deliveries)
            return
        answers = self._applied.clients[caller.rank].answers
        answers[reply.seq] = reply
        if len(answers) > REMEMBERED:
            answers.popitem(last=False)
        self.deliver(caller.rank, reply.seq, reply, deliveries)

    def find_landing(self, caller: Caller, request: m.AnyRequest, *, is_sent: bool) -> Landing:
        """Return where the tensors of a request are, or are to be received if they are sent."""
        if isinstance(request, m.Assign | m.Push | m.Replace):
            return self.find(request.table).landing(caller, request, is_sent=is_sent)
        if isinstance(request, m.LoadState):
            pieces = self.find(request.table).seats.spec_of(request.shard).pieces
            return Landing(landing(request.entries, pieces), follow=True)
        return Landing()

    def find(self, number: int) -> Hosted:
        """Return a table by its number."""
        if not 0 <= number < len(self.hosted):
            raise UnknownKey(f"server {self.index} has no table {number}: open it first")
        return self.hosted[number]

    def bring(self, brings: bool) -> None:
        """Bring values to workers from now on, or not."""
        if brings != self.brings:
            self.brings = brings
            for hosted in self.hosted:
                hosted.seats.brings = brings

    # -- who is there -------------------------------------------------------------------------

    def enter(self, rank: int, worker: int) -> None:
        """Know a worker from now on."""
        self.callers[rank] = Caller(rank, worker, self.surroundings.is_here(rank))

    def drop(self, caller: Caller, *, vacates: bool) -> None:
        """Go on without a worker; `vacates`: its places wait for another one."""
        self.callers.pop(caller.rank, None)
        self.gone.add(caller.rank)
        for hosted in self.hosted:
            hosted.forget(caller)
            if vacates:
                hosted.table.vacate(caller.worker)
            else:
                hosted.table.leave(caller.worker)
            if hosted.maker == caller.worker and not hosted.table.is_ready and not vacates:
                self._abandon(hosted)
        self._release_all()

    def close(self, worker: int) -> None:
        """Give up a place that was vacant: nobody will take it."""
        for hosted in self.hosted:
            if worker in hosted.table.vacant:
                hosted.table.leave(worker)
        self._release_all()

    @property
    def vacant(self) -> set[int]:
        """The numbers of workers whose places wait for others."""
        return {worker for hosted in self.hosted for worker in hosted.table.vacant}

    def _release_all(self) -> None:
        for hosted in self.hosted:
            hosted.release_averages()
            hosted.release()

    def _abandon(self, hosted: Hosted) -> None:
        """Forget a table whose maker is gone before it gave values; others wait for those."""
        name = hosted.table.spec.name
        self.by_name.pop(name, None)
        for parked in hosted.followers:
            text = f"key {name!r} has no value: worker {hosted.maker}, which made it, is gone"
            self.answer(parked.caller, parked.seq, error="UnknownKey", text=text)
        hosted.followers.clear()
