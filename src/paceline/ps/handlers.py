"""What a server does with the requests that belong to no step: state changes first, then answers.

Every handler gets the server, who asks, the request, and its tensors, which are complete. A
PacelineError becomes the answer. Backups run the same handlers on the same requests in the same
order, so nothing here may depend on time, or on what has arrived (accounts and notices excepted).
The requests of a step are in hosted.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paceline.errors import PacelineError, UsageError
from paceline.ps import messages as m
from paceline.ps.hosted import Parked
from paceline.ps.opening import keys, on_find, on_open
from paceline.ps.seats import Caller
from paceline.ps.state_wire import read_state, write_state

_MAX_FOLLOWERS = 1024  # of one worker and table

if TYPE_CHECKING:
    from paceline.ps.server import Server


def on_assign(
    server: Server, caller: Caller, request: m.Assign, given: Sequence[torch.Tensor]
) -> None:
    hosted = server.find(request.table)
    hosted.seats.assign(request.shard, given[0], request.params)
    server.answer(caller, request.seq)
    hosted.release()


def on_peek(server: Server, caller: Caller, request: m.Peek, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    following = hosted.seats.look(caller, request.into)
    server.answer(caller, request.seq, following, version=hosted.table.version)


def on_stand_aside(
    server: Server, caller: Caller, request: m.StandAside, _: Sequence[torch.Tensor]
) -> None:
    hosted = server.find(request.table)
    hosted.table.leave(caller.worker)
    server.answer(caller, request.seq, version=hosted.table.version)
    hosted.release_averages()
    hosted.release()


def on_follow(server: Server, caller: Caller, request: m.Follow, _: Sequence[torch.Tensor]) -> None:
    hosted = server.find(request.table)
    if sum(one.caller is caller for one in hosted.followers) >= _MAX_FOLLOWERS:
        raise UsageError(f"worker {caller.worker} follows {hosted.table.spec.name!r} too often")
    now_s, follower = time.monotonic(), request.follower
    parked = Parked(caller, request.seq, now_s, after=request.after, follower=follower)
    hosted.followers.append(parked)
    hosted.release()


def on_unfollow(
    server: Server, caller: Caller, request: m.Unfollow, _: Sequence[torch.Tensor]
) -> None:
    hosted, follower = server.find(request.table), request.follower
    hosted.end_follow(lambda one: one.caller is caller and one.follower == follower)
    server.answer(caller, request.seq)


def on_keys(server: Server, caller: Caller, request: m.Keys, _: Sequence[torch.Tensor]) -> None:
    server.answer(caller, request.seq, keys=keys(server))


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
        hosted.end_follow(lambda one: one.caller is caller)
    server.answer(caller, request.seq)
    server.drop(caller, vacates=False)


def again(server: Server, caller: Caller, request: m.AnyRequest, reply: m.Reply) -> None:
    """Answer what was handled before, in the same words; values are brought as they are now."""
    try:
        _again(server, caller, request, reply)
    except PacelineError as error:
        server.refuse(caller, request, error)


def _again(server: Server, caller: Caller, request: m.AnyRequest, reply: m.Reply) -> None:
    following: Sequence[torch.Tensor] = ()
    if not reply.error and isinstance(request, m.Peek | m.FetchState):
        HANDLERS[type(request)](server, caller, request, ())
        return
    if not reply.error and isinstance(request, m.Push):
        seats = server.find(request.table).seats
        following, codec = seats.average_for(caller, request.shard)
        reply = msgspec.structs.replace(reply, codec=codec)
    elif not reply.error and (
        isinstance(request, m.Pull) or (isinstance(request, m.Commit) and request.reads)
    ):
        following = server.find(request.table).seats.values_for(caller, request.into)
    server.repeat(caller, reply, following)


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
