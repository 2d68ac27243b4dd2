"""One server's copy of a partition: a set of tables, and a table of handlers.

    an operation -> its handler changes a table -> whoever waited for that change is answered

Operations come one after the other, in the same order on every copy (replication.py), so every
table sees its requests one after the other, and a reader never sees half of an update (large ones
are computed by a few threads, grains.py). The handlers are in handlers.py, the mathematics in
table.py. Who asks, and over which line an answer goes, is partition.py's matter.

A worker that is gone is dropped: what it pushed without committing is gone, the others no longer
wait for it; or its place stays vacant until another one takes it over.

Threads: none; the loop of the process (hosting.py) calls.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from paceline import _core
from paceline.collectives.memory import allocate
from paceline.errors import PacelineError, ProtocolError, UnknownKey, UsageError
from paceline.ps import messages as m
from paceline.ps.caller import Caller
from paceline.ps.handlers import HANDLERS, again, ending
from paceline.ps.hosted import Hosted, Parked, dtype_of, view
from paceline.ps.line import Landing
from paceline.ps.server_spans import ServerSpans
from paceline.ps.spec import TableSpec
from paceline.ps.state_wire import landing
from paceline.ps.table import Table
from paceline.telemetry.trace import tracer
from paceline.telemetry.waiting import Waiting

_PATIENCE_S = 2.0  # a longer wait says on whom


@dataclass
class Asked:
    """A request, its tensors, or why those cannot be had."""

    request: m.AnyRequest
    tensors: Sequence[torch.Tensor] = ()
    refusal: PacelineError | None = None
    # With a commit: what was pushed and is read in place, for copies that cannot do so.
    late: Sequence[tuple[int, torch.Tensor]] = ()
    how: str = ""  # on a backup, until its turn: how it gets the tensors; see peer_wire.py


class Surroundings(Protocol):
    """What a copy needs to know of its process."""

    @property
    def engine(self) -> _core.Engine: ...
    @property
    def is_elastic(self) -> bool: ...
    def is_here(self, rank: int) -> bool:
        """Say whether a process is on this host."""

    def say(self, text: str) -> None:
        """Tell whoever watches the job."""


Answer = Callable[[int, int, m.Reply, Sequence[torch.Tensor]], None]  # rank, seq, ...


class Server:
    """The tables of one partition, and who uses them."""

    def __init__(self, index: int, surroundings: Surroundings, answer: Answer) -> None:
        self.index = index
        self.surroundings = surroundings
        self.callers: dict[int, Caller] = {}  # by rank
        self.gone: set[int] = set()  # ranks that will not come back
        self.hosted: list[Hosted] = []  # by number
        self.by_name: dict[str, Hosted] = {}
        self.brings = True  # values to workers: this copy is the primary
        self.keeps_origins = surroundings.is_elastic  # for another copy
        self._answer = answer
        self._spans = ServerSpans()
        self._complain_s = 0.0  # when a long wait is talked about again

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
            self.release_averages(hosted)
            self.release(hosted)

    def _abandon(self, hosted: Hosted) -> None:
        """Forget a table whose maker is gone before it gave values; others wait for those."""
        name = hosted.table.spec.name
        self.by_name.pop(name, None)
        for parked in hosted.followers:
            text = f"key {name!r} has no value: worker {hosted.maker}, which made it, is gone"
            self.answer(parked.caller, parked.seq, error="UnknownKey", text=text)
        hosted.followers.clear()

    # -- requests -----------------------------------------------------------------------------

    def handle(self, caller: Caller, asked: Asked) -> None:
        if not (tracer.is_planned and self.brings):
            self._handle(caller, asked)
            return
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
            HANDLERS[type(request)](self, caller, request, asked.tensors)
        except PacelineError as error:
            self._refuse(caller, request, error)
        except Exception as error:  # a request must not take the other workers' server with it
            traceback.print_exc()
            what = f"{type(request).__name__} of worker {caller.worker}: {error!r:.200}"
            text = f"server {self.index} cannot handle {what}; its own output says where"
            self._refuse(caller, request, ProtocolError(text))

    def find_tensors(self, caller: Caller, asked: Asked) -> None:
        """On a backup, when it is a request's turn: get hold of what was not sent with it."""
        how, asked.how, request = asked.how, "", asked.request
        if how:
            asked.tensors = self.find_landing(caller, request, is_sent=how == "late").tensors
        if asked.late and isinstance(request, m.Commit) and not self.brings:
            table = self.find(request.table).table
            for shard, grad in asked.late:
                table.renew(caller.worker, shard, grad)

    def handle_again(self, caller: Caller, asked: Asked, reply: m.Reply) -> None:
        """Answer what was handled before."""
        try:
            again(self, caller, asked.request, reply)
        except PacelineError as error:
            self._refuse(caller, asked.request, error)

    def _refuse(self, caller: Caller, request: m.AnyRequest, error: PacelineError) -> None:
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
        self._answer(caller.rank, seq, m.Reply(seq, **fields), deliveries)

    def repeat(self, caller: Caller, reply: m.Reply, deliveries: Sequence[torch.Tensor]) -> None:
        """Give an answer that was given before."""
        self._answer(caller.rank, reply.seq, reply, deliveries)

    def find_landing(self, caller: Caller, request: m.AnyRequest, *, is_sent: bool) -> Landing:
        """Say where the tensors of a request are, or are to be received if they are sent."""
        if isinstance(request, m.LoadState):
            pieces = self.find(request.table).spec_of(request.shard).pieces
            return Landing(landing(request.entries, pieces), follow=True)
        if not isinstance(request, m.Assign | m.Push | m.Replace):
            return Landing()
        hosted = self.find(request.table)
        spec = hosted.spec_of(request.shard)
        if isinstance(request, m.Push) and request.codec:
            return Landing([hosted.packet(caller, request, is_sent)], is_sent or not request.where)
        dtype = dtype_of(request.dtype if isinstance(request, m.Push) else spec.dtype)
        use = "push" if isinstance(request, m.Push) else "replace"
        if request.where is not None and not is_sent:
            return Landing([hosted.view(use, caller, request.shard, request.where, dtype)])
        if isinstance(request, m.Assign):  # rare, and a push may lie in the other memory
            return Landing([torch.empty(spec.count, dtype=dtype)], follow=True)
        staging = hosted.staging("push", caller.worker, request.shard, dtype)
        return Landing([staging], follow=True)

    def find(self, number: int) -> Hosted:
        """Return a table by its number."""
        if not 0 <= number < len(self.hosted):
            raise UnknownKey(f"server {self.index} has no table {number}: open it first")
        return self.hosted[number]

    # -- tables -------------------------------------------------------------------------------

    def host(self, request: m.Open, maker: Caller) -> Hosted:
        """Make a table."""
        engine, homes = self.surroundings.engine, request.homes
        if homes and len(homes) != len(request.spec.shards):
            raise UsageError(f"{len(homes)} homes for {len(request.spec.shards)} shards")
        self._check_workers(request)

        def memory(shard: int, use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
            if homes and use in ("params", "average"):
                return view(engine, maker.rank, getattr(homes[shard], use), count, dtype)
            return allocate(engine, (count,), dtype)

        table = Table(request.spec, memory, time.monotonic, server=self.index)
        here = {caller.worker for caller in self.callers.values()}
        for worker in request.spec.workers:
            if worker not in here:  # gone already: nobody waits for it
                table.leave(worker)
        return self._add(table, bool(homes), maker.worker)

    def host_copy(self, spec: TableSpec, maker: int, *, is_named: bool) -> Hosted:
        """Make a table as another copy has it, without its state."""

        def memory(_shard: int, _use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
            return allocate(self.surroundings.engine, (count,), dtype)

        hosted = self._add(Table(spec, memory, time.monotonic, server=self.index), False, maker)
        if not is_named:
            self.by_name.pop(spec.name)
        return hosted

    def _add(self, table: Table, has_homes: bool, maker: int) -> Hosted:
        engine = self.surroundings.engine
        hosted = Hosted(len(self.hosted), table, engine, has_homes, maker, self.brings)
        self.hosted.append(hosted)
        self.by_name[table.spec.name] = hosted
        return hosted

    def _check_workers(self, request: m.Open) -> None:
        workers = request.spec.workers
        known = {caller.worker for caller in self.callers.values()}
        is_known = self.surroundings.is_elastic or set(workers) <= set(range(self.num_workers))
        if len(set(workers)) < len(workers) or not is_known:
            raise UsageError(
                f"table {request.spec.name!r}: its workers {list(workers[:8])} must be ranks of"
                f" this job (0 to {max(known, default=0)}), each once"
            )

    num_workers = 0  # in a job that does not change

    def is_same(self, there: TableSpec, here: TableSpec) -> bool:
        """Say whether two workers mean the same table; in an elastic job its workers change."""
        if self.surroundings.is_elastic:
            here = msgspec.structs.replace(here, workers=there.workers)
        return there == here

    def join(self, hosted: Hosted, caller: Caller, request: m.Open) -> int:
        """Let a worker take part, if it means to; return the clock that it begins at."""
        table, worker = hosted.table, caller.worker
        is_new = hosted.occupants.get(worker) != caller.rank
        if self.surroundings.is_elastic and is_new and worker in request.spec.workers:
            hosted.occupants[worker] = caller.rank
            return table.join(worker)
        return table.clocks.clock(worker) if worker in table.clocks.workers else 0

    def keys(self) -> tuple[str, ...]:
        """Name the tables that are arrays."""
        return tuple(n for n, hosted in self.by_name.items() if hosted.table.spec.shape is not None)

    def bring(self, brings: bool) -> None:
        """Bring values to workers from now on, or not."""
        if brings != self.brings:
            self.brings = brings
            for hosted in self.hosted:
                hosted.brings = brings

    # -- what follows from a change -----------------------------------------------------------

    def release_averages(self, hosted: Hosted) -> None:
        for shard in [shard for shard, waiting in hosted.pushes.items() if waiting]:
            if not hosted.table.is_reduced(shard):
                self._let_go(hosted, shard)
                continue
            absent, notice = hosted.table.absent(shard), hosted.table.verdict(shard)
            for parked in hosted.pushes.pop(shard):
                self._tell_average(hosted, parked.caller, parked.seq, shard, absent, notice)

    def _let_go(self, hosted: Hosted, shard: int) -> None:
        """Answer those who wait for an average that will not have their part."""
        table, waiting = hosted.table, hosted.pushes[shard]
        dropped = [parked for parked in waiting if table.has_dropped(parked.caller.worker)]
        for parked in dropped:
            waiting.remove(parked)
            absent, notice = table.last_average(shard)
            self._tell_average(hosted, parked.caller, parked.seq, shard, absent, notice)

    def answer_average(
        self,
        hosted: Hosted,
        caller: Caller,
        request: m.Push,
        absent: tuple[int, ...],
        notice: str,
    ) -> None:
        """Answer a push with the average that is there."""
        self._tell_average(hosted, caller, request.seq, request.shard, absent, notice)

    def _tell_average(
        self,
        hosted: Hosted,
        caller: Caller,
        seq: int,
        shard: int,
        absent: tuple[int, ...],
        notice: str,
    ) -> None:
        (following, codec), speaker = (
            hosted.average_for(caller, shard),
            hosted.table.clocks.workers[0],
        )
        self.answer(
            caller, seq, following, absent=absent, codec=codec, speaker=speaker, notice=notice
        )

    def release(self, hosted: Hosted) -> None:
        """Answer the commits of whoever may read now, and whoever follows the version."""
        table = hosted.table
        for parked in list(hosted.readers):  # first come, first served
            if not table.may_read(parked.caller.worker):  # each read may take another's turn
                continue
            hosted.readers.remove(parked)
            self._end_wait(hosted, parked)
        can_change = bool(table.clocks.workers)
        if hosted.followers and (table.is_ready or not can_change):
            self.end_follow(hosted, lambda one: table.version > one.after or not can_change)

    def _end_wait(self, hosted: Hosted, parked: Parked) -> None:
        """Bring values to a reader; if its own places are wrong, that concerns nobody else."""
        caller, outcome = parked.caller, hosted.table.outcome(parked.caller.worker)
        try:
            following = hosted.values_for(caller, parked.into) if parked.reads else ()
        except PacelineError as error:
            self.answer(caller, parked.seq, error=type(error).__name__, text=str(error))
            return
        # Nobody receives what follows an error.
        self.answer(caller, parked.seq, () if outcome.error else following, **ending(outcome))

    def end_follow(self, hosted: Hosted, is_over: Callable[[Parked], bool]) -> None:
        """Tell followers the version."""
        for parked in [one for one in hosted.followers if is_over(one)]:
            hosted.followers.remove(parked)
            self.answer(parked.caller, parked.seq, version=hosted.table.version)

    # -- the clock on the wall ----------------------------------------------------------------

    def long_waits(self, now_s: float) -> list[Waiting]:
        """Return which workers have waited long for an answer, and for which others."""
        found = []
        ranks = {caller.worker: caller.rank for caller in self.callers.values()}
        for hosted in self.hosted:
            for parked in itertools.chain(hosted.readers, *hosted.pushes.values()):
                waited_s = now_s - parked.since_s
                others = hosted.table.awaited(parked.caller.worker)
                missing = tuple(ranks[other] for other in others if other in ranks)
                if waited_s > _PATIENCE_S and missing:
                    what = f"table {hosted.table.spec.name!r}"
                    found.append(Waiting(parked.caller.rank, what, missing, waited_s))
        return found

    def complain(self, now_s: float) -> None:
        """Say who has waited long, and for whom."""
        if now_s < self._complain_s:
            return
        for hosted in self.hosted:
            waiting = itertools.chain(hosted.readers, *hosted.pushes.values())
            late = {p.caller.worker for p in waiting if now_s - p.since_s > _PATIENCE_S}
            if late:
                self._complain_s = now_s + 5 * _PATIENCE_S
                verb = "waits" if len(late) == 1 else "wait"
                others = hosted.table.describe_wait(sorted(late))
                self.surroundings.say(f"{_names('worker', late)} {verb} for {others}")


def _names(noun: str, numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
