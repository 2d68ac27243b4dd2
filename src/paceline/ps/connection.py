"""The line between a worker and the server that answers for a partition: a group of two.

Both ends form it alone, each when it comes to it: the engine's group is named after the partition
and the two processes, and is of the generation in which that server became the partition's primary,
so that a server that becomes it again later cannot take up an old line. The server is the first
member: on one host it never waits for a worker here, only workers for it.

Messages travel as FRAMES of a fixed size, because a receive is posted before anybody knows what
will come; what does not fit follows as the REST. TAGS say what else belongs to which request.

Here are the frames, the pair that both ends share (`Pair`), and the server's end (`Line`); the
worker's end is ps/client/link.py.
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
from paceline.comm.fabric import Fabric, group_id_of
from paceline.comm.tensors import Buffer
from paceline.control.member import Membership
from paceline.errors import BadFrame, PacelineError, PeerTimeout
from paceline.ps import messages as m

FRAME_BYTES = 1024
_HEAD_BYTES = 8  # length of the message; the frame's own format
_VERSION = 1
_MAX_BYTES = 256 << 20

# Tags of point-to-point messages: the kind of traffic, then the request it belongs to.
REQUEST, REQUEST_REST = 1, 2
_PAYLOAD, _REPLY, _REPLY_REST, _DELIVERY = 1, 2, 3, 4
_MAX_SHARDS = 1 << 14

# A worker may have to wait for others as long as those take, so no operation has a deadline here;
# a server that is gone or stopped is noticed all the same.
PATIENCE_S = math.inf
SERVER, WORKER = 0, 1  # their ranks in the group
ANY = -1

_AHEAD = 1024  # requests whose tensors have not come yet
_TURN = 64  # requests that are taken before others have their turn
_UNREAD = 4096  # messages that a worker has not taken
_ROOM = 256  # operations that are remembered before ended ones are looked for

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


def reply_tag(seq: int) -> int:
    return _REPLY << 58 | seq


def reply_rest_tag(seq: int) -> int:
    return _REPLY_REST << 58 | seq


# -- frames -----------------------------------------------------------------------------------


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
    """Return how much of the message follows its frame; BadFrame for one that cannot be ours."""
    length = int.from_bytes(frame[:4].tobytes(), "little")
    if frame[4] != _VERSION or not 0 < length <= _MAX_BYTES:
        raise BadFrame(f"a frame of version {int(frame[4])} and {length} bytes is not ours")
    return max(length - (FRAME_BYTES - _HEAD_BYTES), 0)


def read_request(frame: np.ndarray, rest: np.ndarray | None) -> m.AnyRequest:
    return decode(_requests, frame, rest)  # type: ignore[no-any-return]


def read_reply(frame: np.ndarray, rest: np.ndarray | None) -> m.Reply:
    return decode(_replies, frame, rest)  # type: ignore[no-any-return]


def decode(decoder: Any, frame: np.ndarray, rest: np.ndarray | None) -> Any:
    """Decode with this decoder; BadFrame if it cannot."""
    length = int.from_bytes(frame[:4].tobytes(), "little")
    data = frame[_HEAD_BYTES : _HEAD_BYTES + length].tobytes()
    if rest is not None:
        data += rest.tobytes()
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"a message of {length} bytes cannot be read: {error}") from error


# -- both ends --------------------------------------------------------------------------------


def form_line(
    fabric: Fabric, membership: Membership, partition: int, worker: int, server: int
) -> Pair:
    """Form this process's end of a line. Blocks until the other end is there, on the worker."""
    for rank in (worker, server):
        fabric.link(membership.member(rank))
    core = fabric.create_group(
        group_id_of(f"line {partition} {worker} {server}"),
        membership.primary_since(partition),
        membership,
        (server, worker),
        PATIENCE_S,
    )
    # The server hears "any" of one: a worker that is stopped or busy for long is no error to it.
    return Pair(core, SERVER, SERVER) if fabric.rank == worker else Pair(core, WORKER, ANY)


class Pair:
    """One end of a group of two; keeps the memory of what is under way. Threads: any."""

    def __init__(self, core: _core.Group, to: int, source: int) -> None:
        self._core, self._to, self._source = core, to, source
        self._mu = threading.Lock()
        self._sent, self._posted = _UnderWay(), _UnderWay()  # guarded by: _mu

    def tell(self, message: msgspec.Struct, tag: int, rest_tag: int) -> None:
        """Send a message: its frame, and the rest if it does not fit."""
        frame, rest = to_frames(message)
        self._send(frame, frame.ctypes.data, frame.size, _UINT8, tag)
        if rest is not None:
            self._send(rest, rest.ctypes.data, rest.size, _UINT8, rest_tag)

    def send(self, tensor: torch.Tensor | np.ndarray, tag: int) -> _core.Work:
        """Send a tensor, which must stay as it is until the other end has it."""
        source = Buffer(tensor)
        return self._send(source, source.address, source.count, source.dtype, tag)

    def receive_frame(self, frame: np.ndarray, tag: int, *, background: bool = False) -> _core.Work:
        """Get ready for a frame, or the rest of one."""
        return self._receive(frame, frame.ctypes.data, frame.size, _UINT8, tag, background)

    def receive(self, tensor: torch.Tensor, tag: int, *, background: bool = True) -> _core.Work:
        """Get ready for a tensor, which has to be contiguous."""
        to = Buffer(tensor)
        return self._receive(to, to.address, to.count, to.dtype, tag, background)

    @property
    def backlog(self) -> int:
        """How many frames and tensors the other end has not taken yet."""
        with self._mu:
            return self._sent.count()

    def close(self) -> None:
        """Give up the line; whoever waits for something on it gets GenerationChanged."""
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
        return work


class _UnderWay:
    """Operations under way, with the memory that the engine works on meanwhile."""

    def __init__(self) -> None:
        self._works: deque[tuple[_core.Work, object]] = deque()
        self._room = _ROOM

    def add(self, work: _core.Work, memory: object) -> None:
        self.count()
        self._works.append((work, memory))
        if len(self._works) > self._room:  # one that takes long must not hold up the rest
            self._works = deque(one for one in self._works if not one[0].done())
            self._room = max(_ROOM, 2 * len(self._works))

    def count(self) -> int:
        """Return how many there are; some of those that were overtaken may have ended."""
        while self._works and self._works[0][0].done():
            self._works.popleft()
        return len(self._works)


class Inbox:
    """Messages that come one after the other: a receive for the next one is always posted."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._rest: np.ndarray | None = None  # of the message in `_frame`, when it is to come
        self.post()

    def post(self) -> None:
        """Get ready for the next message."""
        self._rest = None
        self._frame = np.empty(FRAME_BYTES, dtype=np.uint8)
        self.work = self._pair.receive_frame(self._frame, REQUEST)

    def take(self) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Return what has come, frame and rest; None: not all of it has. `post` comes next."""
        self.work.wait()
        if self._rest is None and (size := rest_bytes(self._frame)):
            self._rest = np.empty(size, dtype=np.uint8)
            self.work = self._pair.receive_frame(self._rest, REQUEST_REST)
            return None
        return self._frame, self._rest


# -- the server's end -------------------------------------------------------------------------


@dataclass(frozen=True)
class Landing:
    """Where the tensors of a request are: already there (on one host), or to be received."""

    tensors: Sequence[torch.Tensor] = ()
    follow: bool = False


FindLanding = Callable[["Line", m.AnyRequest], Landing]


@dataclass
class Arrival:
    """A request, and the tensors that follow it."""

    request: m.AnyRequest
    tensors: Sequence[torch.Tensor] = ()
    receiving: list[_core.Work] = field(default_factory=list)
    refusal: PacelineError | None = None  # why its tensors cannot be received

    @property
    def is_complete(self) -> bool:
        return all(work.done() for work in self.receiving)


class Line:
    """One worker, as the server sees it. Used by the server's loop only.

    Nothing here ever waits, because other workers want to be served meanwhile. Tensors that follow
    a request from another host are received where the server wants them while later requests may
    already be there; requests are handed out in order, each with its tensors complete. A worker
    that dies before that takes its half with it. What is sent again is handed out again.

    A worker that sends without end, or never reads its answers, must not fill the server's memory:
    the first is not listened to while it is too far ahead, the second is dropped. One that sends
    what cannot be read is MUTED: whatever it says from then on, it is told why nobody listens.
    """

    def __init__(self, pair: Pair, rank: int) -> None:
        self.rank = rank
        self._pair = pair
        self._inbox = Inbox(pair)
        self._arrivals: deque[Arrival] = deque()
        self._last_seq = 0
        self._reproach = ""  # muted: why

    def works(self) -> Iterator[_core.Work]:
        """Yield what this line waits for."""
        if len(self._arrivals) < _AHEAD:
            yield self._inbox.work
        for arrival in self._arrivals:
            for work in arrival.receiving:
                if not work.done():
                    yield work

    def arrivals(self, find_landing: FindLanding) -> Iterator[Arrival]:
        """Hand out what has arrived completely. `find_landing` says where tensors are.

        PeerError: the line is of no use any more. BadFrame: the worker has to be muted.
        """
        for _ in range(_TURN):
            if not self._inbox.work.done() or len(self._arrivals) >= _AHEAD:
                break
            self._take(find_landing)
        while self._arrivals and self._arrivals[0].is_complete:
            arrival = self._arrivals.popleft()
            for work in arrival.receiving:
                work.wait()
            yield arrival

    def reply(self, reply: m.Reply, deliveries: Sequence[torch.Tensor] = ()) -> None:
        """Answer a request; the deliveries must not change before they are sent."""
        self._pair.tell(reply, reply_tag(reply.seq), reply_rest_tag(reply.seq))
        for number, tensor in enumerate(deliveries):
            self._pair.send(tensor, delivery_tag(reply.seq, number))
        if self._pair.backlog > _UNREAD:
            raise PeerTimeout(
                f"rank {self.rank} asks, but has not taken {_UNREAD} messages", rank=self.rank
            )

    def mute(self, reproach: str) -> None:
        """Listen no more; the request that could not be read is the first that is told so."""
        self._reproach = reproach
        self._arrivals.clear()
        self._inbox.post()
        self._answer_muted()

    def close(self) -> None:
        self._pair.close()

    def _take(self, find_landing: FindLanding) -> None:
        """Read what has come, and get ready for what follows it."""
        if self._reproach:
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

    def _receive_tensors(self, request: m.AnyRequest, find_landing: FindLanding) -> Arrival:
        try:
            landing = find_landing(self, request)
        except PacelineError as error:
            return Arrival(request, refusal=error)
        arrival = Arrival(request, landing.tensors)
        if landing.follow:
            for number, tensor in enumerate(landing.tensors):
                tag = payload_tag(request.seq, number)
                arrival.receiving.append(self._pair.receive(tensor, tag))
        return arrival

    def _answer_muted(self) -> None:
        self._last_seq += 1  # a frame for each request, also when nobody can read it
        reproach = m.Reply(self._last_seq, error="ProtocolError", text=self._reproach)
        self.reply(reproach)
