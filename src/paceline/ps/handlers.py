"""What a server does with each kind of request: state changes first, then who is answered.

Every handler gets the server, the line that the request came on, the request, and its tensors,
which are complete. A PacelineError becomes the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import ShapeMismatch, UnknownKey, UsageError
from paceline.ps import messages as m
from paceline.ps.hosted import Parked
from paceline.ps.ledger import Outcome
from paceline.ps.line import Line
from paceline.ps.spec import TableSpec
from paceline.ps.state_wire import read_state, write_state

_MAX_FOLLOWERS = 1024  # of one worker and table

if TYPE_CHECKING:
    from paceline.ps.server import Server


def on_open(server: Server, line: Line, request: m.Open, _: Sequence[torch.Tensor]) -> None:
    hosted = server.by_name.get(request.spec.name)
    is_new = hosted is None
    if hosted is None:
        hosted = server.host(request, line.worker)
    elif hosted.table.spec != request.spec:
        raise _difference(hosted.table.spec, request.spec, line.worker)
    hosted.take_seat(line.worker, request)
    clocks = hosted.table.clocks
    clock = clocks.clock(line.worker) if line.worker in clocks.workers else 0
    server.answer(line, request.seq, table=hosted.number, is_new=is_new, clock=clock)


def on_find(server: Server, line: Line, request: m.Find, _: Sequence[torch.Tensor]) -> None:
    hosted = server.by_name.get(request.name)
    if hosted is None:
        raise UnknownKey(f"server {server.index} has no key {request.name!r}")
    server.answer(line, request.seq, table=hosted.number, spec=hosted.table.spec)


def on_assign(server: Server, line: Line, request: m.Assign, given: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    hosted.assign(request.shard, given[0], request.params)
    server.answer(line, request.seq)
    server.release(hosted)


def on_push(server: Server, line: Line, request: m.Push, given: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    table = hosted.table
    table.push(line.worker, request.shard, request.clock, given[0], request.absent)
    if table.spec.rule.aggregate:
        parked = Parked(line, request.seq, time.monotonic())
        hosted.pushes.setdefault(request.shard, []).append(parked)
        server.release_averages(hosted)


def on_replace(
    server: Server, line: Line, request: m.Replace, given: Sequence[torch.Tensor]
) -> None:
    hosted = server.find(request.table)
    hosted.table.replace_average(request.shard, given[0], request.absent)
    server.answer(line, request.seq)


def on_commit(server: Server, line: Line, request: m.Commit, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    refusal = hosted.refusals.pop(line.worker, None)
    if refusal is not None:
        hosted.table.discard(line.worker)
        raise refusal
    if not request.counts:
        hosted.table.discard(line.worker)
    hosted.commit(line.worker, request)
    if request.reads or hosted.table.spec.rule.aggregate:
        now_s = time.monotonic()
        hosted.readers.append(Parked(line, request.seq, now_s, request.reads, request.into))
    else:
        server.answer(line, request.seq, **ending(hosted.table.outcome(line.worker)))
    server.release(hosted)


def on_pull(server: Server, line: Line, request: m.Pull, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    if request.in_turn:
        parked = Parked(line, request.seq, time.monotonic(), into=request.into)
        hosted.readers.append(parked)
        server.release(hosted)
        return
    following = hosted.values_for(line.worker, request.into)
    server.answer(line, request.seq, following, version=hosted.table.version)


def on_peek(server: Server, line: Line, request: m.Peek, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    following = hosted.look(line.worker, request.into)
    server.answer(line, request.seq, following, version=hosted.table.version)


def on_stand_aside(
    server: Server, line: Line, request: m.StandAside, _: Sequence[torch.Tensor]
) -> None:
    hosted = server.find(request.table)
    hosted.table.leave(line.worker)
    server.answer(line, request.seq, version=hosted.table.version)
    server.release_averages(hosted)
    server.release(hosted)


def on_follow(server: Server, line: Line, request: m.Follow, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    if sum(one.line is line for one in hosted.followers) >= _MAX_FOLLOWERS:
        raise UsageError(f"worker {line.worker} follows {hosted.table.spec.name!r} too often")
    now_s, follower = time.monotonic(), request.follower
    parked = Parked(line, request.seq, now_s, after=request.after, follower=follower)
    hosted.followers.append(parked)
    server.release(hosted)


def on_unfollow(server: Server, line: Line, request: m.Unfollow, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    server.end_follow(hosted, lambda one: one.line is line and one.follower == request.follower)
    server.answer(line, request.seq)


def on_keys(server: Server, line: Line, request: m.Keys, _: Sequence[torch.Tensor]) -> None:
    server.answer(line, request.seq, keys=server.keys())


def on_fetch_state(
    server: Server, line: Line, request: m.FetchState, _: Sequence[torch.Tensor]
) -> None:
    hosted = server.find(request.table)
    entries, tensors = read_state(hosted.table, request.shard)
    server.answer(line, request.seq, tensors, entries=entries)


def on_load_state(
    server: Server, line: Line, request: m.LoadState, given: Sequence[torch.Tensor]
) -> None:
    write_state(server.find(request.table).table, request, given)
    server.answer(line, request.seq)


def on_stats(server: Server, line: Line, request: m.Stats, _: Sequence[torch.Tensor]) -> None:
    reports = tuple(hosted.table.report() for hosted in server.hosted)
    server.answer(line, request.seq, reports=reports)


def on_leave(server: Server, line: Line, request: m.Leave, _: Sequence[torch.Tensor]) -> None:
    for hosted in server.hosted:
        server.end_follow(hosted, lambda one: one.line is line)
    server.answer(line, request.seq)
    server.drop(line, "it left")


def ending(outcome: Outcome) -> dict[str, Any]:
    """Return how a step ended, as fields of a reply."""
    return {
        "error": outcome.error,
        "text": outcome.text,
        "notice": outcome.notice,
        "version": outcome.version,
        "staleness": outcome.staleness,
    }


HANDLERS: Mapping[type, Callable[[Any, Line, Any, Sequence[torch.Tensor]], None]] = {
    m.Open: on_open,
    m.Find: on_find,
    m.Assign: on_assign,
    m.Push: on_push,
    m.Replace: on_replace,
    m.Commit: on_commit,
    m.Pull: on_pull,
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
