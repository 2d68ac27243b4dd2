"""What a server does with each kind of request: state changes first, then who is answered.

Every handler gets the server, who asks, the request, and its tensors, which are complete. A
PacelineError becomes the answer. Backups run the same handlers on the same requests in the same
order, so nothing here may depend on time, or on what has arrived (accounts and notices excepted).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paceline.errors import ShapeMismatch, UnknownKey, UsageError
from paceline.ps import messages as m
from paceline.ps.caller import Caller
from paceline.ps.hosted import Parked
from paceline.ps.ledger import Outcome
from paceline.ps.spec import TableSpec
from paceline.ps.state_wire import read_state, write_state

_MAX_FOLLOWERS = 1024  # of one worker and table

if TYPE_CHECKING:
    from paceline.ps.server import Server


def on_open(server: Server, caller: Caller, request: m.Open, _: Sequence[torch.Tensor]) -> None:
    hosted = server.by_name.get(request.spec.name)
    is_new = hosted is None
    if hosted is None:
        hosted = server.host(request, caller)
    elif not server.is_same(hosted.table.spec, request.spec):
        raise _difference(hosted.table.spec, request.spec, caller.worker)
    hosted.take_seat(caller, request)
    clock = server.join(hosted, caller, request)
    server.answer(caller, request.seq, table=hosted.number, is_new=is_new, clock=clock)
    server.release(hosted)


def on_find(server: Server, caller: Caller, request: m.Find, _: Sequence[torch.Tensor]) -> None:
    hosted = server.by_name.get(request.name)
    if hosted is None:
        raise UnknownKey(f"server {server.index} has no key {request.name!r}")
    server.answer(caller, request.seq, table=hosted.number, spec=hosted.table.spec)


def on_assign(
    server: Server, caller: Caller, request: m.Assign, given: Sequence[torch.Tensor]
) -> None:
    hosted = server.find(request.table)
    hosted.assign(request.shard, given[0], request.params)
    server.answer(caller, request.seq)
    server.release(hosted)


def on_push(server: Server, caller: Caller, request: m.Push, given: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    table, grad, where = hosted.table, given[0], request.where
    if request.codec:
        grad, where = hosted.unpack(caller, request, grad), None
    counts = table.push(caller.worker, request.shard, request.clock, grad, request.absent)
    if server.keeps_origins:
        hosted.origins["push", caller.worker, request.shard] = where
    if not table.spec.rule.aggregate:
        return
    if not counts:  # a step that was applied, or is too late; the last average is still there
        absent, notice = table.last_average(request.shard)
        server.answer_average(hosted, caller, request, absent, notice)
        server.release_averages(hosted)  # what else it waits for has been dropped as well
        return
    parked = Parked(caller, request.seq, time.monotonic())
    hosted.pushes.setdefault(request.shard, []).append(parked)
    server.release_averages(hosted)


def on_replace(
    server: Server, caller: Caller, request: m.Replace, given: Sequence[torch.Tensor]
) -> None:
    hosted = server.find(request.table)
    does_not_count = hosted.table.is_repeating(caller.worker)
    if not (does_not_count or hosted.table.has_dropped(caller.worker)):
        hosted.table.replace_average(request.shard, given[0], request.absent)
        if server.keeps_origins:
            hosted.origins["replace", 0, request.shard] = request.where
    server.answer(caller, request.seq)


def on_commit(server: Server, caller: Caller, request: m.Commit, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    refusal = hosted.refusals.pop(caller.worker, None)
    if refusal is not None:
        hosted.table.discard(caller.worker)
        raise refusal
    if not request.counts:
        hosted.table.discard(caller.worker)
    hosted.commit(caller, request)
    if request.reads or hosted.table.spec.rule.aggregate:
        now_s = time.monotonic()
        hosted.readers.append(Parked(caller, request.seq, now_s, request.reads, request.into))
    else:
        server.answer(caller, request.seq, **ending(hosted.table.outcome(caller.worker)))
    if hosted.table.spec.rule.backup:  # somebody who waits for an average may be let go
        server.release_averages(hosted)
    server.release(hosted)


def on_pull(server: Server, caller: Caller, request: m.Pull, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    if request.in_turn:
        parked = Parked(caller, request.seq, time.monotonic(), into=request.into)
        hosted.readers.append(parked)
        server.release(hosted)
        return
    following = hosted.values_for(caller, request.into)
    server.answer(caller, request.seq, following, version=hosted.table.version)


def on_peek(server: Server, caller: Caller, request: m.Peek, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    following = hosted.look(caller, request.into)
    server.answer(caller, request.seq, following, version=hosted.table.version)


def on_stand_aside(
    server: Server, caller: Caller, request: m.StandAside, _: Sequence[torch.Tensor]
) -> None:
    hosted = server.find(request.table)
    hosted.table.leave(caller.worker)
    server.answer(caller, request.seq, version=hosted.table.version)
    server.release_averages(hosted)
    server.release(hosted)


def on_follow(server: Server, caller: Caller, request: m.Follow, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    if sum(one.caller is caller for one in hosted.followers) >= _MAX_FOLLOWERS:
        raise UsageError(f"worker {caller.worker} follows {hosted.table.spec.name!r} too often")
    now_s, follower = time.monotonic(), request.follower
    parked = Parked(caller, request.seq, now_s, after=request.after, follower=follower)
    hosted.followers.append(parked)
    server.release(hosted)


def on_unfollow(
    server: Server, caller: Caller, request: m.Unfollow, _: Sequence[torch.Tensor]
) -> None:
    hosted, follower = server.find(request.table), request.follower
    server.end_follow(hosted, lambda one: one.caller is caller and one.follower == follower)
    server.answer(caller, request.seq)


def on_keys(server: Server, caller: Caller, request: m.Keys, _: Sequence[torch.Tensor]) -> None:
    server.answer(caller, request.seq, keys=server.keys())


def on_fetch_state(
    server: Server, caller: Caller, request: m.FetchState, _: Sequence[torch.Tensor]
) -> None:
    hosted = server.find(request.table)
    entries, tensors = read_state(hosted.table, request.shard)
    server.answer(caller, request.seq, tensors, entries=entries)


def on_load_state(
    server: Server, caller: Caller, request: m.LoadState, given: Sequence[torch.Tensor]
) -> None:
    write_state(server.find(request.table).table, request, given)
    server.answer(caller, request.seq)


def on_stats(server: Server, caller: Caller, request: m.Stats, _: Sequence[torch.Tensor]) -> None:
    reports = tuple(hosted.table.report() for hosted in server.hosted)
    server.answer(caller, request.seq, reports=reports)


def on_leave(server: Server, caller: Caller, request: m.Leave, _: Sequence[torch.Tensor]) -> None:
    for hosted in server.hosted:
        server.end_follow(hosted, lambda one: one.caller is caller)
    server.answer(caller, request.seq)
    server.drop(caller, vacates=False)


def again(server: Server, caller: Caller, request: m.AnyRequest, reply: m.Reply) -> None:
    """Answer what was handled before, in the same words; values are brought as they are now."""
    following: Sequence[torch.Tensor] = ()
    if not reply.error and isinstance(request, m.Peek | m.FetchState):
        HANDLERS[type(request)](server, caller, request, ())
        return
    if not reply.error and isinstance(request, m.Push):
        following, codec = server.find(request.table).average_for(caller, request.shard)
        reply = msgspec.structs.replace(reply, codec=codec)
    elif not reply.error and (
        isinstance(request, m.Pull) or (isinstance(request, m.Commit) and request.reads)
    ):
        following = server.find(request.table).values_for(caller, request.into)
    server.repeat(caller, reply, following)


def ending(outcome: Outcome) -> dict[str, Any]:
    """Return how a step ended, as fields of a reply."""
    return {
        "error": outcome.error,
        "text": outcome.text,
        "notice": outcome.notice,
        "version": outcome.version,
        "staleness": outcome.staleness,
        "stops": outcome.stops,
    }


HANDLERS: Mapping[type, Callable[[Any, Caller, Any, Sequence[torch.Tensor]], None]] = {
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
