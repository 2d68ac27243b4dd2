"""Tables are made, found and joined: what workers have to agree on before the first step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from paceline.collectives.memory import allocate
from paceline.errors import ShapeMismatch, UnknownKey, UsageError
from paceline.ps import messages as m
from paceline.ps.hosted import Hosted
from paceline.ps.seats import Caller, Seats, view
from paceline.ps.spec import TableSpec
from paceline.ps.table import Table

if TYPE_CHECKING:
    from paceline.ps.server import Server


def on_open(server: Server, caller: Caller, request: m.Open, _: Sequence[torch.Tensor]) -> None:
    hosted = server.by_name.get(request.spec.name)
    is_new = hosted is None
    if hosted is None:
        hosted = host(server, request, caller)
    elif not _is_same(server, hosted.table.spec, request.spec):
        raise _difference(hosted.table.spec, request.spec, caller.worker)
    hosted.seats.take_seat(caller, request)
    clock = _join(server, hosted, caller, request)
    server.answer(caller, request.seq, table=hosted.number, is_new=is_new, clock=clock)
    hosted.release()


def on_find(server: Server, caller: Caller, request: m.Find, _: Sequence[torch.Tensor]) -> None:
    hosted = server.by_name.get(request.name)
    if hosted is None:
        raise UnknownKey(f"server {server.index} has no key {request.name!r}")
    server.answer(caller, request.seq, table=hosted.number, spec=hosted.table.spec)


def host(server: Server, request: m.Open, maker: Caller) -> Hosted:
    """Make a table."""
    engine, homes = server.surroundings.engine, request.homes
    if homes and len(homes) != len(request.spec.shards):
        raise UsageError(f"{len(homes)} homes for {len(request.spec.shards)} shards")
    _check_workers(server, request)

    def memory(shard: int, use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        if homes and use in ("params", "average"):
            return view(engine, maker.rank, getattr(homes[shard], use), count, dtype)
        return allocate(engine, (count,), dtype)

    table = Table(request.spec, memory, time.monotonic, server=server.index)
    here = {caller.worker for caller in server.callers.values()}
    for worker in request.spec.workers:
        if worker not in here:  # gone already: nobody waits for it
            table.leave(worker)
    return _add(server, table, bool(homes), maker.worker)


def host_copy(server: Server, spec: TableSpec, maker: int, *, is_named: bool) -> Hosted:
    """Make a table as another copy has it, without its state."""

    def memory(_shard: int, _use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(server.surroundings.engine, (count,), dtype)

    hosted = _add(server, Table(spec, memory, time.monotonic, server=server.index), False, maker)
    if not is_named:
        server.by_name.pop(spec.name)
    return hosted


def _add(server: Server, table: Table, has_homes: bool, maker: int) -> Hosted:
    engine = server.surroundings.engine
    seats = Seats(table, engine, has_homes, server.brings)
    keeps_origins = server.surroundings.is_elastic
    hosted = Hosted(len(server.hosted), table, seats, maker, server.answer, keeps_origins)
    server.hosted.append(hosted)
    server.by_name[table.spec.name] = hosted
    return hosted


def _check_workers(server: Server, request: m.Open) -> None:
    workers = request.spec.workers
    known = {caller.worker for caller in server.callers.values()}
    is_known = server.surroundings.is_elastic or set(workers) <= set(range(server.num_workers))
    if len(set(workers)) < len(workers) or not is_known:
        raise UsageError(
            f"table {request.spec.name!r}: its workers {list(workers[:8])} must be ranks of"
            f" this job (0 to {max(known, default=0)}), each once"
        )


def _is_same(server: Server, there: TableSpec, here: TableSpec) -> bool:
    """Say whether two workers mean the same table; in an elastic job its workers change."""
    if server.surroundings.is_elastic:
        here = msgspec.structs.replace(here, workers=there.workers)
    return there == here


def _join(server: Server, hosted: Hosted, caller: Caller, request: m.Open) -> int:
    """Let a worker take part, if it means to; return the clock that it begins at."""
    table, worker = hosted.table, caller.worker
    is_new = hosted.occupants.get(worker) != caller.rank
    if server.surroundings.is_elastic and is_new and worker in request.spec.workers:
        hosted.occupants[worker] = caller.rank
        return table.join(worker)
    return table.clocks.clock(worker) if worker in table.clocks.workers else 0


def keys(server: Server) -> tuple[str, ...]:
    """Name the tables that are arrays."""
    return tuple(n for n, hosted in server.by_name.items() if hosted.table.spec.shape is not None)


def _difference(there: TableSpec, here: TableSpec, worker: int) -> UsageError:
    """Say what another worker's idea of the same table is different in."""
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
