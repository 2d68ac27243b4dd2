"""Targets of the parameter servers: frames, requests with what follows from them, and packets."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import msgspec
import numpy as np
import torch

from fuzz.target import target
from paceline import _core
from paceline.errors import BadFrame, PacelineError
from paceline.ps import connection, packing
from paceline.ps import messages as m
from paceline.ps.replication import messages as between
from paceline.ps.replication import wire
from paceline.ps.spec import OptimizerSpec, Rule, ShardPiece, ShardSpec, TableSpec

_ROOM = connection.FRAME_BYTES


def _frame_and_rest(data: bytes) -> tuple[np.ndarray, np.ndarray | None]:
    """Split a stream as the receiver does: a frame, and as much of the rest as there is."""
    frame = np.frombuffer(data[:_ROOM].ljust(_ROOM, b"\0"), dtype=np.uint8)
    size = connection.rest_bytes(frame)
    rest = np.frombuffer(data[_ROOM : _ROOM + min(size, 1 << 16)], dtype=np.uint8)
    return frame, rest if size else None


def framed(message: bytes) -> bytes:
    """Return an encoded message as it travels."""
    return len(message).to_bytes(4, "little") + b"\1\0\0\0" + message


@target(BadFrame)
def server_frame(data: bytes) -> None:
    connection.read_request(*_frame_and_rest(data))


@target(BadFrame, form="msgpack")
def server_reply(data: bytes) -> None:
    connection.read_reply(*_frame_and_rest(framed(data)))


@target(BadFrame, form="msgpack")
def replication_message(data: bytes) -> None:
    """A message of another server, up to where its tensors are received."""
    message = between.read(*_frame_and_rest(framed(data)))
    if isinstance(message, between.VisibleWorkers) or _needs_memory(message):
        return
    server = _server()
    with contextlib.suppress(PacelineError):
        wire.decode(message, wire.landing(message, server, 0))


def _needs_memory(message: between.AnyMessage) -> bool:
    """A server may send as many numbers as its tables have: that is not looked for."""
    part = getattr(message, "part", message)
    return sum(count for _, count in getattr(part, "shapes", ())) > 1 << 16


# -- requests that a server handles ----------------------------------------------------------------


class Context:
    """The process around a server: worker 0 is on its host, worker 1 on another one."""

    engine = _core.Engine(2, 1, 60.0, 60.0, 60.0)
    is_elastic = True
    rank = 2

    def is_here(self, rank: int) -> bool:
        return rank == 0

    def log(self, text: str) -> None: ...


def _server() -> Any:
    from paceline.ps.replication.applied import Applied, ClientRecord
    from paceline.ps.server.server import Server

    class Alone:
        """A copy without backups."""

        is_alone = is_open = True

        def __init__(self) -> None:
            self.applied = Applied()

    server = Server(0, Context(), Alone(), lambda rank, event: None)  # type: ignore[arg-type]
    for rank in (0, 1):
        server.enter(rank, rank)
        server._applied.clients[rank] = ClientRecord()
    return server


def spec(name: str, rule: Rule, count: int = 8) -> TableSpec:
    """Return a small table."""
    piece = ShardPiece("w", 0, 0, 0, count, (count,))
    shard = ShardSpec("shard 0", "float32", count, (piece,))
    return TableSpec(name, (0, 1), (shard,), OptimizerSpec("SGD", ({"lr": 0.1},)), rule)


@target(form="msgpack")
def server_requests(data: bytes) -> None:
    """A story: a list of [worker, request]; every request is answered, and none is our bug."""
    try:
        story = msgspec.msgpack.decode(data, type=list[tuple[int, msgspec.Raw]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    from paceline.ps.server.server import ServerRequest

    server, printed, seq = _server(), io.StringIO(), 0
    for worker, raw in story[:40]:
        try:
            request = connection.read_request(*_frame_and_rest(framed(bytes(raw))))
        except BadFrame:
            continue
        caller = server.callers.get(worker % 2)
        if caller is None or _is_large(request):
            continue
        seq += 1
        request = msgspec.structs.replace(request, seq=seq)
        try:
            landed = server.find_landing(caller, request, is_sent=False).tensors
        except PacelineError:
            continue
        for tensor in landed:
            tensor.zero_()
        with contextlib.redirect_stderr(printed):
            server.take(caller.rank, ServerRequest(request, landed))
    found = printed.getvalue()
    assert "Traceback" not in found, found[-3000:]


def _is_large(request: m.AnyRequest) -> bool:
    """A worker may fill a server's memory with tables (SECURITY.md): that is not looked for."""
    if isinstance(request, m.Open):
        return sum(shard.count for shard in request.spec.shards) > 1 << 16
    return False


@target(PacelineError, form="msgpack")
def packed_push(data: bytes) -> None:
    """A push through a codec that its sender has named: [codec, elements, bytes]."""
    try:
        codec, count, payload = msgspec.msgpack.decode(data, type=tuple[str, int, bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    shard = spec("t", Rule(0, aggregate=True), count % 3000 + 1).shards[0]
    unpacking = packing.Unpacking()
    push = m.Push(1, 0, 0, 0, None, "float32", (), codec, len(payload))
    try:
        contents = unpacking.contents(0, shard, push)
    except PacelineError:
        # The right length follows from the codec: try again with a packet of that length.
        contents = unpacking._make(shard, codec)
        if contents.num_bytes > 1 << 20:
            return
        payload = payload[: contents.num_bytes].ljust(contents.num_bytes, b"\0")
        push = msgspec.structs.replace(push, num_bytes=len(payload))
        contents = unpacking.contents(0, shard, push)
    memory = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    packing.unpack(contents, shard, push, memory, torch.empty(shard.count))
