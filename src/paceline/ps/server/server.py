"""One server's copy of a partition: its connections, its tables, and how it handles requests.

    a request arrives -> its handler changes a table -> parked requests that waited are answered

Requests are handled one at a time, so a reader never sees half of an update (large updates are
computed by a few threads, optimizer.py). The requests of a step are in table_requests.py, all
others in handlers.py, the updates in table.py.

A copy that is ALONE applies a request when it arrives, and answers it. With several copies a
request becomes an entry of the log that all of them apply in the same order
(ps/replication/partition.py, ps/replication/replication.py), and its answer leaves when all have
applied it.

A worker that is lost is dropped: what it pushed without committing is discarded, and the other
workers no longer wait for it; or its slot stays open until a replacement takes it.

Threads: none; the loop of the process (process.py) calls.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from paceline import _core
from paceline.errors import BadFrame, PacelineError, PeerError, ProtocolError, UnknownKey
from paceline.observe.telemetry.trace import tracer
from paceline.ps import messages as m
from paceline.ps.connection import Connection, Landing, RequestArrival, WorkerConnection
from paceline.ps.replication import messages as p
from paceline.ps.replication.applied import REMEMBERED
from paceline.ps.replication.replication import Replica
from paceline.ps.server.arrivals import Arrivals, Due
from paceline.ps.server.handlers import HANDLERS
from paceline.ps.server.table_requests import STEP, ServedTable
from paceline.ps.server.telemetry import Load, ServerSpans
from paceline.ps.server.worker_memory import NOTHING, Caller, Delivery
from paceline.ps.state_wire import landing


@dataclass
class ServerRequest:
    """A request, its tensors, or why they cannot be used."""

    request: m.AnyRequest
    tensors: Sequence[torch.Tensor] = ()
    refusal: PacelineError | None = None
    # With a commit: what was pushed and is read in place, for copies that cannot do so.
    late: Sequence[tuple[int, torch.Tensor]] = ()
    how: str = ""  # on a backup, until it is applied: how it gets the tensors; replication/wire.py


class ServerContext(Protocol):
    """What a copy needs from its process."""

    rank: int

    @property
    def engine(self) -> _core.Engine: ...
    @property
    def arrivals(self) -> Arrivals: ...
    @property
    def is_elastic(self) -> bool: ...
    def is_here(self, rank: int) -> bool:
        """Return whether a process is on this host."""

    def log(self, text: str) -> None:
        """Send a line to the launcher's log."""


class Server:
    """The tables of one partition, and the workers that use them."""

    num_workers = 0  # in a job that is not elastic

    def __init__(
        self,
        index: int,
        context: ServerContext,
        replica: Replica,
        share: Callable[[int, ServerRequest | p.Event], None],
    ) -> None:
        """`share(rank, ...)` adds a request of a worker, or an event, to the log of all copies."""
        self.index = index
        self.context = context
        self.connections: dict[int, WorkerConnection] = {}  # by the worker's rank
        self._due: Due = {}  # connections that have something to handle, in order
        self.broken: list[tuple[WorkerConnection, PeerError]] = []  # connections that failed
        self.load = Load()
        self.callers: dict[int, Caller] = {}  # by rank
        self.gone: set[int] = set()  # ranks that have left for good
        self.tables: list[ServedTable] = []  # by number
        self.by_name: dict[str, ServedTable] = {}
        self.delivers_values = True  # to workers: this copy is the primary
        self.deferred: list[Callable[[], None]] = []  # updates that a backup has yet to compute
        self._replica, self._applied, self._share = replica, replica.applied, share
        self._leaving: dict[int, int] = {}  # by rank: the number of its Leave
        self._spans = ServerSpans()

    def clear(self) -> None:
        """Forget all tables and workers."""
        for memory in (self.callers, self.gone, self.tables, self.by_name, self.deferred):
            memory.clear()

    # -- connections --------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether requests of workers are handled."""
        return self._replica.is_alone or self._replica.is_open

    def connect(self, pair: Connection, rank: int) -> None:
        """Handle what a worker sends on this connection from now on."""
        self.connections[rank] = self.context.arrivals.watch(pair, rank, self._due)

    @property
    def is_due(self) -> bool:
        """Whether something that has arrived from workers can be handled."""
        return bool(self._due) and self.is_open

    def serve(self) -> None:
        """Handle what has arrived from workers."""
        if not self.is_due:
            return
        due = list(self._due)
        self._due.clear()  # the same object: what arrives is noted there
        for connection in due:
            if self.connections.get(connection.rank) is connection:
                self.serve_connection(connection)
                if connection.has_more:
                    self._due[connection] = None

    def serve_connection(self, connection: WorkerConnection) -> None:
        """Handle what has arrived from one worker."""
        try:
            for arrival in connection.arrivals(self._find_landing):
                self._take(connection, arrival)
                if self.connections.get(connection.rank) is not connection:
                    return
        except BadFrame as error:
            self._mute(connection, error)
        except PeerError as error:
            self.broken.append((connection, error))

    def _take(self, connection: WorkerConnection, arrival: RequestArrival) -> None:
        started_s, request = time.perf_counter(), arrival.request
        if connection.rank not in self.callers:  # it was dropped; its Leave may still arrive
            refused = "" if isinstance(request, m.Leave) else ProtocolError.__name__
            connection.reply(m.Reply(request.seq, error=refused, text="this worker counts as gone"))
            return
        self.take(connection.rank, ServerRequest(request, arrival.tensors, arrival.refusal))
        self.load.requests += 1
        for tensor in arrival.tensors:
            self.load.num_bytes += tensor.nbytes
        self.load.busy_s += time.perf_counter() - started_s

    def take(self, rank: int, received: ServerRequest) -> None:
        """Apply a new request at once if this copy is alone; else let all copies apply it."""
        client, seq = self._applied.clients.get(rank), received.request.seq
        if not self._replica.is_alone or client is None or seq <= client.last:
            self._share(rank, received)  # the log knows what was answered before
            return
        client.last = seq
        self._applied.index += 1
        self.apply(self.callers[rank], received)

    def _find_landing(self, connection: WorkerConnection, request: m.AnyRequest) -> Landing:
        caller = self.callers.get(connection.rank)
        return Landing() if caller is None else self.find_landing(caller, request, is_sent=False)

    def _mute(self, connection: WorkerConnection, error: BadFrame) -> None:
        """Drop a worker whose messages cannot be decoded."""
        caller = self.callers.get(connection.rank)
        who = connection.rank if caller is None else caller.worker
        said = f"has stopped listening to worker {who}: {error}"
        self.context.log(said)
        if caller is not None:
            self._share(connection.rank, p.WorkerGone(connection.rank))
        try:
            connection.mute(
                f"server {self.index} {said}. Do all processes run the same version of Paceline?"
            )
        except PeerError as lost:
            self.broken.append((connection, lost))

    def deliver(self, rank: int, seq: int, reply: m.Reply, delivery: Delivery) -> None:
        """Send an answer to a worker, if it is connected."""
        connection = self.connections.get(rank)
        if connection is None:
            return
        if delivery is not NOTHING:  # not part of the reply that all copies remember
            delivers, places = bool(delivery.tensors), delivery.places
            reply = msgspec.structs.replace(reply, delivers=delivers, places=places)
        try:
            connection.reply(reply, delivery.tensors)
        except PeerError as error:
            self.broken.append((connection, error))
        if self._leaving and self._leaving.get(rank) == seq:
            self.hang_up(rank)

    def hang_up(self, rank: int) -> None:
        """Close the connection to a worker."""
        connection = self.connections.pop(rank, None)
        self._leaving.pop(rank, None)
        if connection is not None:
            self.context.arrivals.forget(connection)
            connection.close()

    # -- requests -----------------------------------------------------------------------------

    def apply(self, caller: Caller, received: ServerRequest) -> None:
        """Handle a request, the same on every copy."""
        is_last = isinstance(received.request, m.Leave)
        if is_last:
            self._leaving[caller.rank] = received.request.seq
        if tracer.is_planned and self.delivers_values:
            self._handle_traced(caller, received)
        else:
            self._handle(caller, received)
        if is_last:
            self._applied.forget(caller.rank)

    def _handle_traced(self, caller: Caller, received: ServerRequest) -> None:
        request, num_bytes = received.request, sum(tensor.nbytes for tensor in received.tensors)
        with self._spans.handling(caller, request, num_bytes):
            self._handle(caller, received)
            if isinstance(request, m.Push) and not self._is_averaged(request):
                self._spans.unanswered(caller, request.seq)

    def _is_averaged(self, push: m.Push) -> bool:
        is_known = 0 <= push.table < len(self.tables)
        return is_known and self.tables[push.table].table.spec.rule.aggregate

    def _handle(self, caller: Caller, received: ServerRequest) -> None:
        request = received.request
        try:
            if received.refusal is not None:
                raise received.refusal
            step = STEP.get(type(request))
            if step is not None:
                step(self.find(request.table), caller, request, received.tensors)  # type: ignore[union-attr]
            else:
                HANDLERS[type(request)](self, caller, request, received.tensors)
        except PacelineError as error:
            self.refuse(caller, request, error)
        except Exception as error:  # a request must not take the other workers' server with it
            traceback.print_exc()
            what = f"{type(request).__name__} of worker {caller.worker}: {error!r:.200}"
            text = f"server {self.index} cannot handle {what}; its own output says where"
            self.refuse(caller, request, ProtocolError(text))

    def find_tensors(self, caller: Caller, received: ServerRequest) -> None:
        """On a backup, before a request is applied: find the tensors that were not sent with it."""
        how, received.how, request = received.how, "", received.request
        if how:
            received.tensors = self.find_landing(caller, request, is_sent=how == "late").tensors
        if received.late and isinstance(request, m.Commit) and not self.delivers_values:
            table = self.find(request.table).table
            for shard, grad in received.late:
                table.renew(caller.worker, shard, grad)

    def refuse(self, caller: Caller, request: m.AnyRequest, error: PacelineError) -> None:
        """Answer with an error; a push without a reply is refused with its commit."""
        if isinstance(request, m.Push) and 0 <= request.table < len(self.tables):
            served = self.tables[request.table]
            if not served.table.spec.rule.aggregate:
                served.refusals.setdefault(caller.worker, error)
                return
        self.answer(caller, request.seq, error=type(error).__name__, text=str(error))

    def answer(self, caller: Caller, seq: int, delivery: Delivery = NOTHING, **fields: Any) -> None:
        """Answer a request, with what belongs to the reply."""
        if tracer.is_planned:
            self._spans.answered(caller, seq)
        self.repeat(caller, m.Reply(seq, **fields), delivery)

    def repeat(self, caller: Caller, reply: m.Reply, delivery: Delivery = NOTHING) -> None:
        """Send an answer, perhaps for the second time; it leaves when all copies have it."""
        if not self._replica.is_alone:
            self._replica.answer(caller.rank, reply.seq, reply, delivery)
            return
        answers = self._applied.clients[caller.rank].answers
        answers[reply.seq] = reply
        if len(answers) > REMEMBERED:
            answers.popitem(last=False)
        self.deliver(caller.rank, reply.seq, reply, delivery)

    def find_landing(self, caller: Caller, request: m.AnyRequest, *, is_sent: bool) -> Landing:
        """Return where the tensors of a request are, or are to be received if they are sent."""
        if isinstance(request, m.Assign | m.Push | m.Replace):
            return self.find(request.table).landing(caller, request, is_sent=is_sent)
        if isinstance(request, m.LoadState):
            pieces = self.find(request.table).buffers.spec_of(request.shard).pieces
            return Landing(landing(request.entries, pieces), follow=True)
        return Landing()

    def find(self, number: int) -> ServedTable:
        """Return a table by its number."""
        if not 0 <= number < len(self.tables):
            raise UnknownKey(f"server {self.index} has no table {number}: open it first")
        return self.tables[number]

    def set_delivering(self, delivers_values: bool) -> None:
        """Bring values to workers from now on, or not."""
        if delivers_values != self.delivers_values:
            self.delivers_values = delivers_values
            self.settle()
            for served in self.tables:
                served.buffers.delivers_values = delivers_values
                self.let_defer(served)

    def let_defer(self, served: ServedTable) -> None:
        """Let a table compute updates after they are acknowledged, if this copy is a backup."""
        for shard in served.table.shards:
            shard.defer_to = None if self.delivers_values else self.deferred

    def settle(self) -> None:
        """Compute the updates that were deferred."""
        while self.deferred:
            self.deferred.pop()()

    # -- workers ------------------------------------------------------------------------------

    def enter(self, rank: int, worker: int) -> None:
        """Register a worker."""
        self.callers[rank] = Caller(rank, worker, self.context.is_here(rank))

    def drop(self, caller: Caller, *, vacates: bool) -> None:
        """Drop a worker; `vacates`: its slots wait for a replacement."""
        self.callers.pop(caller.rank, None)
        self.gone.add(caller.rank)
        for served in self.tables:
            served.forget(caller)
            if vacates:
                served.table.vacate(caller.worker)
            else:
                served.table.leave(caller.worker)
            if served.maker == caller.worker and not served.table.is_ready and not vacates:
                self._abandon(served)
        self._release_all()

    def close(self, worker: int) -> None:
        """Close an open slot: there will be no replacement."""
        for served in self.tables:
            if worker in served.table.vacant:
                served.table.leave(worker)
        self._release_all()

    @property
    def vacant(self) -> set[int]:
        """The numbers of workers whose slots wait for a replacement."""
        return {worker for served in self.tables for worker in served.table.vacant}

    def _release_all(self) -> None:
        for served in self.tables:
            served.release_averages()
            served.release()

    def _abandon(self, served: ServedTable) -> None:
        """Forget a table whose maker left before it gave values, which other workers wait for."""
        name = served.table.spec.name
        self.by_name.pop(name, None)
        for parked in served.followers:
            text = f"key {name!r} has no value: worker {served.maker}, which made it, is gone"
            self.answer(parked.caller, parked.seq, error="UnknownKey", text=text)
        served.followers.clear()
