"""The connection between a worker and the server that answers for a partition: a group of two.

Both ends form it alone, each at its own time. The engine's group is named after the partition and
the two processes, and is of the generation in which that server became the partition's primary, so
that a server that becomes it again later cannot reuse an old connection. The server is the first
member: on one host it never waits for a worker here, only workers for it.

Messages travel as FRAMES of a fixed size, because a receive is posted before its message is known;
the part that does not fit follows as the REST. TAGS name the kind of traffic and its request.
`WorkerConnection` is the server's end, `ServerConnection` the worker's.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from paceline import _core
from paceline.comm.fabric import Fabric
from paceline.comm.lazy_channels import POINT_TO_POINT
from paceline.comm.tensors import Buffer
from paceline.control.member import Membership
from paceline.errors import BadFrame, PacelineError, PeerTimeout
from paceline.observe.telemetry.trace import tracer
from paceline.ps import messages as m
from paceline.ps.connection_id import connection_id

FRAME_BYTES = 1024
_HEAD_BYTES = 8  # length of the message; the frame's own format
_VERSION = 1
_MAX_BYTES = 256 << 20

# Tags of point-to-point messages: the kind of traffic, then the request it belongs to.
REQUEST, REQUEST_REST = 1, 2
_PAYLOAD, _REPLY, _REPLY_REST, _DELIVERY = 1, 2, 3, 4
_MAX_SHARDS = 1 << 14

# No deadline: workers wait for slower ones. A server that is lost or stopped is noticed anyway.
PATIENCE_S = math.inf
SERVER, WORKER, ANY = 0, 1, -1  # their ranks in the group

_AHEAD = 1024  # requests whose tensors have not arrived yet
_TURN = 64  # requests that are taken before the next connection's turn
_UNREAD = 4096  # messages that a worker has not taken
_ROOM = 256  # operations that are kept before ended ones are looked for

_UINT8 = _core.DTYPES.index("uint8")
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(m.AnyRequest)
_replies = msgspec.msgpack.Decoder(m.Reply)


def payload_tag(seq: int, shard: int = 0) -> int:
    """Return the tag of a tensor that follows a request."""
    return _PAYLOAD << 58 | seq * _MAX_SHARDS + shard


def delivery_tag(seq: int, shard: int = 0) -> int:
    """Return the tag of a tensor that follows a reply."""
    return _DELIVERY << 58 | seq * _MAX_SHARDS + shard


def reply_tag(seq: int, *, is_rest: bool = False) -> int:
    """Return the tag of a reply, or of its rest."""
    return (_REPLY_REST if is_rest else _REPLY) << 58 | seq


def to_frames(message: msgspec.Struct) -> tuple[np.ndarray, np.ndarray | None]:
    """Encode a message: the frame, and the rest if it does not fit."""
    data = _encoder.encode(message)
    room, frame = FRAME_BYTES - _HEAD_BYTES, bytearray(FRAME_BYTES)
    frame[:4] = len(data).to_bytes(4, "little")
    frame[4] = _VERSION
    head = data[:room]
    frame[_HEAD_BYTES : _HEAD_BYTES + len(head)] = head
    rest = np.frombuffer(data[room:], dtype=np.uint8) if len(data) > room else None
    return np.frombuffer(frame, dtype=np.uint8), rest


def rest_bytes(frame: np.ndarray) -> int:
    """Return how much of the message follows its frame; BadFrame if the frame is not Paceline's."""
    length = int.from_bytes(frame[:4].tobytes(), "little")
    if frame[4] != _VERSION or not 0 < length <= _MAX_BYTES:
        raise BadFrame(f"a frame of version {int(frame[4])} and {length} bytes is not Paceline's")
    return max(length - (FRAME_BYTES - _HEAD_BYTES), 0)


def read_request(frame: np.ndarray, rest: np.ndarray | None) -> m.AnyRequest:
    return decode(_requests, frame, rest)  # type: ignore[no-any-return]


def read_reply(frame: np.ndarray, rest: np.ndarray | None) -> m.Reply:
    return decode(_replies, frame, rest)  # type: ignore[no-any-return]


def decode(decoder: Any, frame: np.ndarray, rest: np.ndarray | None) -> Any:
    """Decode with this decoder; BadFrame if it cannot."""
    length = int.from_bytes(frame[:4].tobytes(), "little")
    data = frame[_HEAD_BYTES : _HEAD_BYTES + length].tobytes()
    data += b"" if rest is None else rest.tobytes()
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"a message of {length} bytes cannot be read: {error}") from error


def form_connection(
    fabric: Fabric, membership: Membership, partition: int, worker: int, server: int
) -> Connection:
    """Form this process's end of a connection. On the worker, blocks for the server."""
    for rank in (worker, server):
        fabric.link(membership.member(rank))
    core = fabric.create_group(
        connection_id(partition, worker, server),
        membership.primary_since(partition),
        membership,
        (server, worker),
        PATIENCE_S,
        POINT_TO_POINT,
    )
    # The server receives from any of one: a worker that is stopped or busy for long is no error.
    return Connection(core, *((SERVER, SERVER) if fabric.rank == worker else (WORKER, ANY)))


class Connection:
    """One end of a group of two; keeps the memory that operations use. Threads: any."""

    def __init__(self, core: _core.Group, to: int, source: int) -> None:
        self._core, self._to, self._source = core, to, source
        self.on_receive: Callable[[_core.Work], object] | None = None  # called with each receive
        self._mu = threading.Lock()
        self._sent, self._posted = _Operations(), _Operations()  # guarded by: _mu

    def send_message(self, message: msgspec.Struct, tag: int, rest_tag: int) -> None:
        """Send a message: its frame, and the rest if it does not fit."""
        for part, part_tag in zip(to_frames(message), (tag, rest_tag), strict=True):
            if part is not None:
                self._send(part, part.ctypes.data, part.size, _UINT8, part_tag)

    def send(self, tensor: torch.Tensor | np.ndarray, tag: int) -> _core.Work:
        """Send a tensor, which must not change until the other end has it."""
        source = Buffer(tensor)
        return self._send(source, source.address, source.count, source.dtype, tag)

    def receive_frame(self, frame: np.ndarray, tag: int, *, background: bool = False) -> _core.Work:
        """Post the receive of a frame, or the rest of one."""
        return self._receive(frame, frame.ctypes.data, frame.size, _UINT8, tag, background)

    def receive(self, tensor: torch.Tensor, tag: int, *, background: bool = True) -> _core.Work:
        """Post the receive of a tensor, which has to be contiguous."""
        to = Buffer(tensor)
        return self._receive(to, to.address, to.count, to.dtype, tag, background)

    @property
    def backlog(self) -> int:
        """The number of frames and tensors that the other end has not taken yet."""
        with self._mu:
            return self._sent.count()

    def close(self) -> None:
        """Close the connection; what waits for something on it gets GenerationChanged."""
        self._core.close()

    def _send(self, memory: object, address: int, count: int, dtype: int, tag: int) -> _core.Work:
        work = self._core.start_send(self._to, tag, address, count, dtype, True)
        with self._mu:
            self._sent.add(work, memory)
        return work

    def _receive(
        self, memory: object, address: int, count: int, dtype: int, tag: int, background: bool
    ) -> _core.Work:
        work = self._core.start_receive(self._source, tag, address, count, dtype, background)
        with self._mu:
            self._posted.add(work, memory)
        if self.on_receive is not None:
            self.on_receive(work)
        return work


class _Operations:
    """Operations that have not ended, with the memory that the engine works on meanwhile."""

    def __init__(self) -> None:
        self._works: deque[tuple[_core.Work, object]] = deque()
        self._room = _ROOM

    def add(self, work: _core.Work, memory: object) -> None:
        self.count()
        self._works.append((work, memory))
        if len(self._works) > self._room:  # a slow one must not keep the rest
            self._works = deque(one for one in self._works if not one[0].done())
            self._room = max(_ROOM, 2 * len(self._works))

    def count(self) -> int:
        """Return how many there are; some after the first may have ended."""
        while self._works and self._works[0][0].done():
            self._works.popleft()
        return len(self._works)


class Inbox:
    """Messages that arrive in order: a receive for the next one is always posted."""

    def __init__(self, pair: Connection) -> None:
        self._pair = pair
        self._rest: np.ndarray | None = None  # of the message in `_frame`, if it follows
        self.post()

    def post(self) -> None:
        """Post the receive of the next message."""
        self._rest = None
        self._frame = np.empty(FRAME_BYTES, dtype=np.uint8)
        self.work = self._pair.receive_frame(self._frame, REQUEST)

    def take(self) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Return frame and rest; None: not all has arrived. Call `post` next."""
        self.work.wait()
        if self._rest is None and (size := rest_bytes(self._frame)):
            self._rest = np.empty(size, dtype=np.uint8)
            self.work = self._pair.receive_frame(self._rest, REQUEST_REST)
            return None
        return self._frame, self._rest


@dataclass(frozen=True)
class Landing:
    """Where the tensors of a request are: already there (on one host), or to be received."""

    tensors: Sequence[torch.Tensor] = ()
    follow: bool = False


FindLanding = Callable[["WorkerConnection", m.AnyRequest], Landing]


@dataclass
class RequestArrival:
    """A request, and the tensors that follow it."""

    request: m.AnyRequest
    tensors: Sequence[torch.Tensor] = ()
    receiving: list[_core.Work] = field(default_factory=list)
    refusal: PacelineError | None = None  # why its tensors cannot be received


class WorkerConnection:
    """The server's end of a connection to one worker. Used by the server's loop only.

    Nothing here waits, because other workers need the server meanwhile. Tensors that follow a
    request from another host are received where the server wants them, while later requests may
    have arrived already. Requests are handed out in order, each with its tensors complete; a
    request that is sent again is handed out again.

    A worker must not fill the server's memory. One that sends too far ahead is not read from
    meanwhile; one that never reads its replies is dropped. A worker that sends what cannot be
    decoded is MUTED: every later request is answered with the reason.
    """

    def __init__(self, pair: Connection, rank: int, number: int = 0) -> None:
        self.rank, self.number = rank, number  # the number is this process's own
        self._pair = pair
        self._inbox = Inbox(pair)
        self._arrivals: deque[RequestArrival] = deque()
        self._last_seq = 0
        self._muted = ""  # why this worker is muted

    @property
    def has_more(self) -> bool:
        """Whether something that has arrived was left for the next turn."""
        if len(self._arrivals) < _AHEAD and self._inbox.work.done():
            return True
        return bool(self._arrivals) and all(w.done() for w in self._arrivals[0].receiving)

    def arrivals(self, find_landing: FindLanding) -> Iterator[RequestArrival]:
        """Yield what has arrived completely. `find_landing` returns where tensors are.

        PeerError: the connection is broken. BadFrame: the worker has to be muted.
        """
        for _ in range(_TURN):
            if not self._inbox.work.done() or len(self._arrivals) >= _AHEAD:
                break
            self._take(find_landing)
        while self._arrivals and all(work.done() for work in self._arrivals[0].receiving):
            arrival = self._arrivals.popleft()
            for work in arrival.receiving:
                work.wait()
            yield arrival

    def reply(self, reply: m.Reply, deliveries: Sequence[torch.Tensor] = ()) -> None:
        """Answer a request; the deliveries must not change before they are sent."""
        self._pair.send_message(reply, reply_tag(reply.seq), reply_tag(reply.seq, is_rest=True))
        for number, tensor in enumerate(deliveries):
            self._pair.send(tensor, delivery_tag(reply.seq, number))
        if self._pair.backlog > _UNREAD:
            text = f"rank {self.rank} sends requests, but has not read {_UNREAD} messages"
            raise PeerTimeout(text, rank=self.rank)

    def mute(self, why: str) -> None:
        """Handle no more requests; the one that was not read gets the first such reply."""
        self._muted = why
        self._arrivals.clear()
        self._inbox.post()
        self._answer_muted()

    def close(self) -> None:
        self._pair.close()

    def _take(self, find_landing: FindLanding) -> None:
        """Read a request that has arrived, and post the receives of what follows it."""
        if self._muted:
            self._inbox.work.wait()
            self._inbox.post()
            self._answer_muted()
            return
        taken = self._inbox.take()
        if taken is None:
            return
        request = read_request(*taken)
        self._inbox.post()
        self._last_seq = max(self._last_seq, request.seq)
        self._arrivals.append(self._receive_tensors(request, find_landing))

    def _receive_tensors(self, request: m.AnyRequest, find_landing: FindLanding) -> RequestArrival:
        try:
            landing = find_landing(self, request)
        except PacelineError as error:
            return RequestArrival(request, refusal=error)
        receiving = [
            self._pair.receive(tensor, payload_tag(request.seq, number))
            for number, tensor in enumerate(landing.tensors if landing.follow else ())
        ]
        return RequestArrival(request, landing.tensors, receiving)

    def _answer_muted(self) -> None:
        self._last_seq += 1  # a frame for each request, even one that cannot be decoded
        self.reply(m.Reply(self._last_seq, error="ProtocolError", text=self._muted))


Into = Callable[[m.Reply], Sequence[torch.Tensor]]


class IncomingReply:
    """A reply that is awaited, and the memory that its frame lands in."""

    def __init__(self, seq: int, frame: np.ndarray, work: _core.Work) -> None:
        self.seq, self.frame, self.work = seq, frame, work

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is needed from the server: no tensors, and no memory of it."""
        if not self.work.done() or self.work.error() is not None or rest_bytes(self.frame):
            return False
        return not read_reply(self.frame, None).is_more


class ServerConnection:
    """The worker's end of a connection to one server."""

    def __init__(self, fabric: Fabric, membership: Membership, partition: int, server: int) -> None:
        self.member = membership.member(server)
        self.is_local = membership.member(fabric.rank).host_id == self.member.host_id
        self._pair = form_connection(fabric, membership, partition, fabric.rank, server)

    def expect(self, seq: int) -> IncomingReply:
        """Post the receive of the reply to a request."""
        frame = np.empty(FRAME_BYTES, dtype=np.uint8)
        return IncomingReply(seq, frame, self._pair.receive_frame(frame, reply_tag(seq)))

    def send(self, request: m.AnyRequest, payload: Sequence[torch.Tensor]) -> list[_core.Work]:
        """Send a request, and the tensors that follow it; return the works of those."""
        if tracer.on:
            request = msgspec.structs.replace(request, step=tracer.step)
        self._pair.send_message(request, REQUEST, REQUEST_REST)
        return [
            self._pair.send(tensor, payload_tag(request.seq, number))
            for number, tensor in enumerate(payload)
        ]

    def read(self, incoming: IncomingReply, into: Into) -> m.Reply:
        """Read a reply whose frame has arrived. Blocks for the tensors that follow it."""
        size, rest = rest_bytes(incoming.frame), None
        if size:
            rest = np.empty(size, dtype=np.uint8)
            self._pair.receive_frame(rest, reply_tag(incoming.seq, is_rest=True)).wait()
        reply = read_reply(incoming.frame, rest)
        if reply.delivers and not reply.error:
            works = [
                self._pair.receive(tensor, delivery_tag(incoming.seq, number))
                for number, tensor in enumerate(into(reply))
            ]
            for work in works:
                work.wait()
        return reply

    def close(self) -> None:
        self._pair.close()
