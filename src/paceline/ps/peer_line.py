"""The line between two servers: what they say about all the partitions that both have copies of.

One line for all, for as long as both are in the job. Messages are taken strictly one after the
other, each with the tensors that follow it: what a message does may decide where those of the next
one belong.

Threads: formed in a helper thread; then used by the server's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from paceline import _core
from paceline.cluster.member import Membership
from paceline.collectives.fabric import Fabric, identity
from paceline.errors import PeerTimeout
from paceline.ps import peer_messages as p
from paceline.ps.line import PATIENCE_S, REQUEST, REQUEST_REST, Inbox, Pair, payload_tag

_UNREAD = 1 << 16  # messages that the other server has not taken

FindLanding = Callable[[p.AnyMessage], Sequence[torch.Tensor]]


def form_peer_line(fabric: Fabric, membership: Membership, peer: int) -> Pair:
    """Form this process's end. Blocks until the other one is there."""
    fabric.link(membership.member(peer))
    pair = tuple(sorted((fabric.rank, peer)))
    name = identity(f"servers {pair[0]} {pair[1]}")
    core = fabric.create_group(name, 1, membership, pair, PATIENCE_S)
    # By name: a server that falls silent without a farewell is missed, in time.
    return Pair(core, pair.index(peer), pair.index(peer))


class PeerLine:
    """The other server, as this one sees it."""

    def __init__(self, pair: Pair, peer: int) -> None:
        self.peer = peer
        self._pair = pair
        self._inbox = Inbox(pair)
        self._sent = self._taken = 0  # messages, so that their tensors have tags of their own
        self._message: p.AnyMessage | None = None  # the next one
        self._is_landing = False  # its tensors are on their way
        self._tensors: Sequence[torch.Tensor] = ()
        self._receiving: list[_core.Work] = []

    def works(self) -> Iterator[_core.Work]:
        """Yield what this line waits for."""
        if self._message is None:
            yield self._inbox.work
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
            self._inbox.post()
            yield message, self._tensors

    def send(self, message: p.AnyMessage, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message; its tensors must stay as they are until the other server has them."""
        self._pair.tell(message, REQUEST, REQUEST_REST)
        for number, tensor in enumerate(tensors):
            self._pair.send(tensor, payload_tag(self._sent, number))
        self._sent += 1
        if self.backlog > _UNREAD:
            raise PeerTimeout(f"rank {self.peer} has not taken {_UNREAD} messages", rank=self.peer)

    @property
    def backlog(self) -> int:
        """How many messages and tensors the other server has not taken yet."""
        return self._pair.backlog

    def close(self) -> None:
        self._pair.close()

    def _take(self) -> bool:
        while self._inbox.work.done():
            taken = self._inbox.take()
            if taken is not None:
                self._message = p.read(*taken)
                return True
        return False

    def _receive_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        self._is_landing, self._tensors = True, tensors
        self._receiving = [
            self._pair.receive(tensor, payload_tag(self._taken, number))
            for number, tensor in enumerate(tensors)
        ]
        self._taken += 1
