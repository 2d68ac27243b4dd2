"""The server's end of the line to one worker: what has arrived, in order, and what is answered.

A receive for the next request is always posted; nothing here ever waits, because other workers want
to be served meanwhile. Tensors that follow a request from another host are received where the
server wants them while later requests may already be there; requests are handed out in order, each
with its tensors complete. A worker that dies before that takes its half with it. What is sent again
is handed out again: replication.py knows what was answered.

A worker that sends without end, or never reads its answers, must not fill the server's memory: the
first is not listened to while it is too far ahead, the second is dropped. One that sends what
cannot be read is MUTED: whatever it says from then on, it is told why nobody listens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.collectives.group import Group
from paceline.errors import PacelineError, PeerTimeout
from paceline.ps import messages as m
from paceline.ps.line_group import WORKER
from paceline.work import Work

_AHEAD = 1024  # requests whose tensors have not come yet
_TURN = 64  # requests that are taken before others have their turn
_UNREAD = 4096  # messages that a worker has not taken


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
    receiving: list[Work[Any]] = field(default_factory=list)
    refusal: PacelineError | None = None  # why its tensors cannot be received

    def is_complete(self) -> bool:
        return all(work.done() for work in self.receiving)


class Line:
    """One worker, as the server sees it. Used by the server's loop only."""

    def __init__(self, group: Group, rank: int) -> None:
        self.rank = rank
        self._group = group
        self._arrivals: deque[Arrival] = deque()
        self._last_seq = 0
        self._unread: deque[Work[Any]] = deque()
        self._reading: tuple[np.ndarray, np.ndarray] | None = None  # a frame, and its rest to come
        self._reproach = ""  # muted: why
        self._post()

    def works(self) -> Iterator[Work[Any]]:
        """What this line waits for."""
        if len(self._arrivals) < _AHEAD:
            yield self._receive
        for arrival in self._arrivals:
            for work in arrival.receiving:
                if not work.done():
                    yield work

    def arrivals(self, find_landing: FindLanding) -> Iterator[Arrival]:
        """Hand out what has arrived completely. `find_landing` says where tensors are.

        PeerError: the line is of no use any more. BadFrame: the worker has to be muted.
        """
        for _ in range(_TURN):
            if not self._receive.done() or len(self._arrivals) >= _AHEAD:
                break
            self._take(find_landing)
        while self._arrivals and self._arrivals[0].is_complete():
            arrival = self._arrivals.popleft()
            for work in arrival.receiving:
                work.wait()
            yield arrival

    def reply(self, reply: m.Reply, deliveries: Sequence[torch.Tensor] = ()) -> None:
        """Answer a request; the deliveries must not change before they are sent."""
        self._send(reply)
        for number, tensor in enumerate(deliveries):
            self._put(tensor, m.delivery_tag(reply.seq, number))

    def mute(self, reproach: str) -> None:
        """Listen no more; the request that could not be read is the first that is told so."""
        self._reproach = reproach
        self._arrivals.clear()
        self._reading = None
        self._post()
        self._answer_muted()

    def close(self) -> None:
        self._group.close()

    def _post(self) -> None:
        self._frame = np.empty(m.FRAME_BYTES, dtype=np.uint8)
        self._receive = self._get(self._frame, m.REQUEST)

    def _get(
        self, target: np.ndarray | torch.Tensor, tag: int, *, background: bool = False
    ) -> Work[int]:
        # From "any" of one: a worker that is stopped or busy for long is no error to the server.
        receive = self._group.recv(target, None, tag=tag, async_op=True, background=background)
        assert isinstance(receive, Work)
        return receive

    def _take(self, find_landing: FindLanding) -> None:
        """Read what has come, and get ready for what follows it."""
        self._receive.wait()
        if self._reproach:
            self._post()
            self._answer_muted()
            return
        frame, rest = self._reading or (self._frame, None)
        if rest is None and (size := m.rest_bytes(frame)):
            self._reading = (frame, np.empty(size, dtype=np.uint8))
            self._receive = self._get(self._reading[1], m.REQUEST_REST)
            return
        request = m.read_request(frame, rest)
        self._reading = None
        self._post()
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
                tag = m.payload_tag(request.seq, number)
                arrival.receiving.append(self._get(tensor, tag, background=True))
        return arrival

    def _send(self, reply: m.Reply) -> None:
        frame, rest = m.to_frames(reply)
        self._put(frame, m.reply_tag(reply.seq))
        if rest is not None:
            self._put(rest, m.reply_rest_tag(reply.seq))

    def _answer_muted(self) -> None:
        self._last_seq += 1  # a frame for each request, also when nobody can read it
        self._send(m.Reply(self._last_seq, error="ProtocolError", text=self._reproach))

    def _put(self, tensor: np.ndarray | torch.Tensor, tag: int) -> None:
        work = self._group.send(tensor, WORKER, tag=tag, async_op=True)
        assert isinstance(work, Work)
        while self._unread and self._unread[0].done():
            self._unread.popleft()
        self._unread.append(work)
        if len(self._unread) > _UNREAD:
            raise PeerTimeout(
                f"rank {self.rank} asks, but has not taken {_UNREAD} messages", rank=self.rank
            )
