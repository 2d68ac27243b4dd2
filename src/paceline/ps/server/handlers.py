"""Handlers of the requests that belong to no step: each changes state first, then answers.

Every handler gets the server, the caller, the request, and its tensors, which are complete. A
PacelineError becomes the answer. Backups run the same handlers on the same requests in the same
order, so nothing here may depend on time, or on what has arrived (statistics and notices excepted).
The requests of a step are in table_requests.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paceline.comm.shared_memory import allocate, zeros_in_large_pages
from paceline.errors import PacelineError, ShapeMismatch, UnknownKey, UsageError
from paceline.ps import messages as m
from paceline.ps.server.exposed_memory import ExposedMemory, can_expose
from paceline.ps.server.table import Table
from paceline.ps.server.table_requests import ParkedRequest, ServedTable
from paceline.ps.server.worker_memory import NOTHING, Caller, Delivery, WorkerBuffers, view
from paceline.ps.spec import TableSpec
from paceline.ps.state_wire import read_state, write_state

if TYPE_CHECKING:
    from paceline.ps.server.server import Server

_MAX_FOLLOWERS = 1024  # of one worker and table


def on_open(server: Server, caller: Caller, request: m.Open, _: Sequence[torch.Tensor]) -> None:
    served = server.by_name.get(request.spec.name)
    is_new = served is None
    if served is None:
        served = host(server, request, caller)
    elif not _is_same(server, served.table.spec, request.spec):
        raise _difference(served.table.spec, request.spec, caller.worker)
    served.buffers.register(caller, request)
    clock = _join(server, served, caller, request)
    server.answer(caller, request.seq, table=served.number, is_new=is_new, clock=clock)
    served.release()


def on_find(server: Server, caller: Caller, request: m.Find, _: Sequence[torch.Tensor]) -> None:
    served = server.by_name.get(request.name)
    if served is None:
        raise UnknownKey(f"server {server.index} has no key {request.name!r}")
    server.answer(caller, request.seq, table=served.number, spec=served.table.spec)


def host(server: Server, request: m.Open, maker: Caller) -> ServedTable:
    """Create a table."""
    engine, shared = server.context.engine, request.shared
    if shared and len(shared) != len(request.spec.shards):
        raise UsageError(f"{len(shared)} shared tensors for {len(request.spec.shards)} shards")
    _check_workers(server, request)

    exposed = None
    if request.maps and can_expose(request.spec):
        exposed = ExposedMemory(engine, server.context.rank, request.spec)

    def memory(shard: int, use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        if shared and use in ("params", "average"):
            return view(engine, maker.rank, getattr(shared[shard], use), count, dtype)
        if exposed is not None:
            return exposed.allocate(shard, use, dtype)
        return allocate(engine, (count,), dtype)

    table = Table(request.spec, memory, time.monotonic, server=server.index)
    here = {caller.worker for caller in server.callers.values()}
    for worker in request.spec.workers:
        if worker not in here:  # it has left already: no worker waits for it
            table.leave(worker)
    served = _add(server, table, bool(shared), maker.worker)
    if exposed is not None:
        served.buffers.exposed = exposed.places
    return served


def host_copy(server: Server, spec: TableSpec, maker: int, *, is_named: bool) -> ServedTable:
    """Create a table of zeros like another copy's, without its state.

    Its memory is private, because the kernel provides that page by page: workers wait for this copy
    meanwhile, and for engine memory of 500 MB they would wait most of a second. Values are copied
    to workers anyway, since a copy shares no memory with them.
    """

    def memory(_shard: int, _use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        return zeros_in_large_pages(count, dtype)

    served = _add(server, Table(spec, memory, time.monotonic, server=server.index), False, maker)
    if not is_named:
        server.by_name.pop(spec.name)
    return served


def _add(server: Server, table: Table, is_shared: bool, maker: int) -> ServedTable:
    engine = server.context.engine
    buffers = WorkerBuffers(table, engine, is_shared, server.delivers_values)
    keeps_origins = server.context.is_elastic
    served = ServedTable(len(server.tables), table, buffers, maker, server.answer, keeps_origins)
    server.tables.append(served)
    server.let_defer(served)
    server.by_name[table.spec.name] = served
    return served


def _check_workers(server: Server, request: m.Open) -> None:
    workers = request.spec.workers
    known = {caller.worker for caller in server.callers.values()}
    is_known = server.context.is_elastic or set(workers) <= set(range(server.num_workers))
    if len(set(workers)) < len(workers) or not is_known:
        raise UsageError(
            f"table {request.spec.name!r}: its workers {list(workers[:8])} must be ranks of"
            f" this job (0 to {max(known, default=0)}), each once"
        )


def _is_same(server: Server, there: TableSpec, here: TableSpec) -> bool:
    """Return whether two workers mean the same table; in an elastic job its workers change."""
    if server.context.is_elastic:
        here = msgspec.structs.replace(here, workers=there.workers)
    return there == here


def _join(server: Server, served: ServedTable, caller: Caller, request: m.Open) -> int:
    """Let a worker join a table, if the spec names it; return the clock that it begins at."""
    table, worker = served.table, caller.worker
    is_new = served.occupants.get(worker) != caller.rank
    if server.context.is_elastic and is_new and worker in request.spec.workers:
        served.occupants[worker] = caller.rank
        return table.join(worker)
    return table.clocks.clock(worker) if worker in table.clocks.workers else 0


def keys(server: Server) -> tuple[str, ...]:
    """Return the names of the tables that are arrays."""
    return tuple(n for n, served in server.by_name.items() if served.table.spec.shape is not None)


def _difference(there: TableSpec, here: TableSpec, worker: int) -> UsageError:
    """Return the error that another worker describes the same table differently."""
    advice = "use another name, or the same shape, dtype, optimizer and pace everywhere"
    if _array(there) != _array(here):
        return ShapeMismatch(
            f"key {there.name!r} exists with {_array(there)}, but worker {worker} wants it with"
            f" {_array(here)}; {advice}"
        )
    what = next(f for f in there.__struct_fields__ if getattr(there, f) != getattr(here, f))
    kind = ShapeMismatch if what == "shards" else UsageError
    return kind(
        f"key {there.name!r} exists with {what} {str(getattr(there, what))[:200]}, but worker"
        f" {worker} wants it with {str(getattr(here, what))[:200]}; {advice}"
    )


def _array(spec: TableSpec) -> str:
    if spec.shape is None:
        return "the shards of a model"
    return f"shape {list(spec.shape)} and dtype {spec.shards[0].dtype}"


def on_assign(
    server: Server, caller: Caller, request: m.Assign, given: Sequence[torch.Tensor]
) -> None:
    served = server.find(request.table)
    served.buffers.assign(request.shard, given[0], request.params)
    server.answer(caller, request.seq)
    served.release()


def on_peek(server: Server, caller: Caller, request: m.Peek, _: Sequence[torch.Tensor]) -> None:
    served = server.find(request.table)
    delivery = served.buffers.look(caller, request.into)
    server.answer(caller, request.seq, delivery, version=served.table.version)


def on_stand_aside(
    server: Server, caller: Caller, request: m.StandAside, _: Sequence[torch.Tensor]
) -> None:
    served = server.find(request.table)
    served.table.leave(caller.worker)
    server.answer(caller, request.seq, version=served.table.version)
    served.release_averages()
    served.release()


def on_follow(server: Server, caller: Caller, request: m.Follow, _: Sequence[torch.Tensor]) -> None:
    served = server.find(request.table)
    if sum(one.caller is caller for one in served.followers) >= _MAX_FOLLOWERS:
        raise UsageError(f"worker {caller.worker} follows {served.table.spec.name!r} too often")
    now_s, follower = time.monotonic(), request.follower
    parked = ParkedRequest(caller, request.seq, now_s, after=request.after, follower=follower)
    served.followers.append(parked)
    served.release()


def on_unfollow(
    server: Server, caller: Caller, request: m.Unfollow, _: Sequence[torch.Tensor]
) -> None:
    served, follower = server.find(request.table), request.follower
    served.end_follow(lambda one: one.caller is caller and one.follower == follower)
    server.answer(caller, request.seq)


def on_keys(server: Server, caller: Caller, request: m.Keys, _: Sequence[torch.Tensor]) -> None:
    server.answer(caller, request.seq, keys=keys(server))


def on_fetch_state(
    server: Server, caller: Caller, request: m.FetchState, _: Sequence[torch.Tensor]
) -> None:
    served = server.find(request.table)
    entries, tensors = read_state(served.table, request.shard)
    server.answer(caller, request.seq, Delivery(tensors), entries=entries)


def on_load_state(
    server: Server, caller: Caller, request: m.LoadState, given: Sequence[torch.Tensor]
) -> None:
    write_state(server.find(request.table).table, request, given)
    server.answer(caller, request.seq)


def on_stats(server: Server, caller: Caller, request: m.Stats, _: Sequence[torch.Tensor]) -> None:
    reports = tuple(served.table.report() for served in server.tables)
    server.answer(caller, request.seq, reports=reports)


def on_leave(server: Server, caller: Caller, request: m.Leave, _: Sequence[torch.Tensor]) -> None:
    for served in server.tables:
        served.end_follow(lambda one: one.caller is caller)
    server.answer(caller, request.seq)
    server.drop(caller, vacates=False)


def again(server: Server, caller: Caller, request: m.AnyRequest, reply: m.Reply) -> None:
    """Repeat the answer to a request that was handled before, with today's values."""
    try:
        _again(server, caller, request, reply)
    except PacelineError as error:
        server.refuse(caller, request, error)


def _again(server: Server, caller: Caller, request: m.AnyRequest, reply: m.Reply) -> None:
    delivery = NOTHING
    if not reply.error and isinstance(request, m.Peek | m.FetchState):
        HANDLERS[type(request)](server, caller, request, ())
        return
    if not reply.error and isinstance(request, m.Push):
        buffers = server.find(request.table).buffers
        delivery, codec = buffers.average_for(caller, request.shard)
        reply = msgspec.structs.replace(reply, codec=codec)
    elif not reply.error and (
        isinstance(request, m.Pull) or (isinstance(request, m.Commit) and request.reads)
    ):
        delivery = server.find(request.table).buffers.values_for(caller, request.into)
    server.repeat(caller, reply, delivery)


HANDLERS: Mapping[type, Callable[[Any, Caller, Any, Sequence[torch.Tensor]], None]] = {
    m.Open: on_open,
    m.Find: on_find,
    m.Assign: on_assign,
    m.Peek: on_peek,
    m.StandAside: on_stand_aside,
    m.Follow: on_follow,
    m.Unfollow: on_unfollow,
    m.Keys: on_keys,
    m.FetchState: on_fetch_state,
    m.LoadState: on_load_state,
    m.Stats: on_stats,
    m.Leave: on_leave,
}
