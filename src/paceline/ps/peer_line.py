"""The line between two servers: what they say about all the partitions that both have copies of.

One line for all, for as long as both are in the job. Messages are taken strictly one after the
other, each with the tensors that follow it: what a message does may decide where those of the next
one belong.

Threads: formed in a helper thread; then used by the server's loop only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from paceline.cluster.member import Membership
from paceline.collectives.fabric import Fabric
from paceline.collectives.group import Group
from paceline.errors import PeerTimeout
from paceline.ps import messages as m
from paceline.ps import peer_messages as p
from paceline.work import Work

_UNREAD = 1 << 16  # messages that the other server has not taken

FindLanding = Callable[[p.AnyMessage], Sequence[torch.Tensor]]


def form_peer_line(fabric: Fabric, membership: Membership, peer: int) -> Group:
    """Form this process's end. Blocks until the other one is there."""
    fabric.link(membership.member(peer))
    pair = tuple(sorted((fabric.rank, peer)))
    name = f"servers {pair[0]} {pair[1]}"
    return Group(fabric, pair, math.inf, name=name, generation=1, membership=membership)


class PeerLine:
    """The other server, as this one sees it."""

    def __init__(self, group: Group, peer: int) -> None:
        self.peer = peer
        self._group = group
        self._to = group.ranks.index(peer)
        self._sent = self._taken = 0  # messages, so that their tensors have tags of their own
        self._unread: deque[Work[Any]] = deque()
        self._reading: tuple[np.ndarray, np.ndarray] | None = None  # a frame, and its rest to come
        self._message: p.AnyMessage | None = None  # the next one
        self._is_landing = False  # its tensors are on their way
        self._tensors: Sequence[torch.Tensor] = ()
        self._receiving: list[Work[Any]] = []
        self._frame: np.ndarray
        self._receive: Work[int]
        self._post()

    def works(self) -> Iterator[Work[Any]]:
        """What this line waits for."""
        if self._message is None:
            yield self._receive
        for work in self._receiving:
            if not work.done():
                yield work

    def arrivals(
        self, is_due: Callable[[p.AnyMessage], bool], find_landing: FindLanding
    ) -> Iterator[tuple[p.AnyMessage, Sequence[torch.Tensor]]]:
        """Hand out what has arrived completely, when it is due. PeerError: the line is broken."""
        while True:
            if self._message is None and not self._take():
                return
            assert self._message is not None
            if not self._is_landing:
                if not is_due(self._message):
                    return
                self._receive_tensors(find_landing(self._message))
            if not all(work.done() for work in self._receiving):
                return
            for work in self._receiving:
                work.wait()
            message, self._message, self._receiving = self._message, None, []
            self._is_landing = False
            self._post()
            yield message, self._tensors

    def send(self, message: p.AnyMessage, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message; its tensors must stay as they are until the other server has them."""
        frame, rest = m.to_frames(message)
        self._put(frame, m.REQUEST)
        if rest is not None:
            self._put(rest, m.REQUEST_REST)
        for number, tensor in enumerate(tensors):
            self._put(tensor, m.payload_tag(self._sent, number))
        self._sent += 1

    @property
    def backlog(self) -> int:
        """How many messages and tensors the other server has not taken yet."""
        while self._unread and self._unread[0].done():
            self._unread.popleft()
        return len(self._unread)

    def close(self) -> None:
        self._group.close()

    def _take(self) -> bool:
        if not self._receive.done():
            return False
        self._receive.wait()
        frame, rest = self._reading or (self._frame, None)
        if rest is None and (size := m.rest_bytes(frame)):
            self._reading = (frame, np.empty(size, dtype=np.uint8))
            self._receive = self._get(self._reading[1], m.REQUEST_REST)
            return self._take()
        self._message = p.read(frame, rest)
        self._reading = None
        return True

    def _receive_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        self._is_landing, self._tensors = True, tensors
        self._receiving = [
            self._get(tensor, m.payload_tag(self._taken, number), background=True)
            for number, tensor in enumerate(tensors)
        ]
        self._taken += 1

    def _post(self) -> None:
        self._frame = np.empty(m.FRAME_BYTES, dtype=np.uint8)
        self._receive = self._get(self._frame, m.REQUEST)

    def _get(
        self, target: np.ndarray | torch.Tensor, tag: int, *, background: bool = False
    ) -> Work[int]:
        # By name: a server that falls silent without a farewell is missed, in time.
        receive = self._group.recv(target, self._to, tag=tag, async_op=True, background=background)
        assert isinstance(receive, Work)
        return receive

    def _put(self, tensor: np.ndarray | torch.Tensor, tag: int) -> None:
        work = self._group.send(tensor, self._to, tag=tag, async_op=True)
        assert isinstance(work, Work)
        self._unread.append(work)
        if self.backlog > _UNREAD:
            raise PeerTimeout(f"rank {self.peer} has not taken {_UNREAD} messages", rank=self.peer)
