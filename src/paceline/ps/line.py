"""The server's end of the line to one worker: what has arrived, in order, and what is answered.

A receive for the next request is always posted. Tensors that follow a request from another host are
received where the server wants them while later requests may already be there; requests are handed
out in order, each with its tensors complete. A worker that dies before that takes its half with it.

A request that is sent again is answered again with the same words and not handed out: `_replies`
remembers the newest answers by sequence number.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.collectives.group import Group
from paceline.collectives.topology import Fabric
from paceline.errors import PacelineError
from paceline.ps import messages as m
from paceline.ps.link import PATIENCE_S
from paceline.work import Work

_REMEMBERED = 64  # answers; a worker has fewer questions under way


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

    def __init__(self, fabric: Fabric, worker: int) -> None:
        self.worker = worker
        here, there = (fabric.membership.member(rank) for rank in (fabric.rank, worker))
        self.is_local = here.host_id == there.host_id
        self._group = Group(fabric, (worker, fabric.rank), PATIENCE_S)
        self._arrivals: deque[Arrival] = deque()
        self._last_seq = 0
        self._replies: OrderedDict[int, m.Reply] = OrderedDict()
        self._post()

    def works(self) -> Iterator[Work[Any]]:
        """What this line waits for."""
        yield self._receive
        for arrival in self._arrivals:
            for work in arrival.receiving:
                if not work.done():
                    yield work

    def arrivals(self, find_landing: FindLanding) -> Iterator[Arrival]:
        """Hand out what has arrived completely. `find_landing` says where tensors are.

        PeerError or BadFrame: the line is of no use any more.
        """
        while self._receive.done():
            self._take(find_landing)
        while self._arrivals and self._arrivals[0].is_complete():
            arrival = self._arrivals.popleft()
            for work in arrival.receiving:
                work.wait()
            yield arrival

    def reply(self, reply: m.Reply, deliveries: Sequence[torch.Tensor] = ()) -> None:
        """Answer a request; the deliveries must not change before they are sent."""
        self._replies[reply.seq] = reply
        if len(self._replies) > _REMEMBERED:
            self._replies.popitem(last=False)
        self._send(reply)
        for number, tensor in enumerate(deliveries):
            self._group.send(tensor, 0, tag=m.delivery_tag(reply.seq, number), async_op=True)

    def close(self) -> None:
        self._group.close()

    def _post(self) -> None:
        self._frame = np.empty(m.FRAME_BYTES, dtype=np.uint8)
        # From "any" of one: a worker that is stopped or busy for long is no error to the server.
        receive = self._group.recv(
            self._frame, None, tag=m.REQUEST, async_op=True, background=False
        )
        assert isinstance(receive, Work)
        self._receive: Work[int] = receive

    def _take(self, find_landing: FindLanding) -> None:
        """Read one request and get ready for what follows it and for the next one."""
        self._receive.wait()
        frame, size, rest = self._frame, m.rest_bytes(self._frame), None
        if size:
            rest = np.empty(size, dtype=np.uint8)
            self._group.recv(rest, 0, tag=m.REQUEST_REST)
        self._post()
        request = m.read_request(frame, rest)
        if request.seq <= self._last_seq:
            if request.seq in self._replies:
                self._send(self._replies[request.seq])
            return
        self._last_seq = request.seq
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
                work = self._group.recv(tensor, 0, tag=tag, async_op=True)
                assert isinstance(work, Work)
                arrival.receiving.append(work)
        return arrival

    def _send(self, reply: m.Reply) -> None:
        frame, rest = m.to_frames(reply)
        self._group.send(frame, 0, tag=m.reply_tag(reply.seq), async_op=True)
        if rest is not None:
            self._group.send(rest, 0, tag=m.reply_rest_tag(reply.seq), async_op=True)
