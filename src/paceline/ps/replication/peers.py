"""The other servers, as this one can reach them: lines, who sees whose memory, whom to accuse.

There is one line to each, for all the partitions that both have copies of, and for as long as both
are in the job. Messages are taken strictly one after the other, each with the tensors that follow
it: what a message does may decide where those of the next one belong.

Threads: lines are formed in helper threads; then the loop of the process (ps/server/process.py)
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from paceline import _core
from paceline.comm.fabric import Fabric, group_id_of
from paceline.control.member import Membership
from paceline.errors import BadFrame, PacelineError, PeerError, PeerTimeout
from paceline.ps.connection import PATIENCE_S, REQUEST, REQUEST_REST, Connection, Inbox, payload_tag
from paceline.ps.replication import messages as p

_UNREAD = 1 << 16  # messages that the other server has not taken

FindLanding = Callable[[p.AnyMessage], Sequence[torch.Tensor]]


def form_peer_connection(fabric: Fabric, membership: Membership, peer: int) -> Connection:
    """Form this process's end. Blocks until the other one is there."""
    fabric.link(membership.member(peer))
    pair = tuple(sorted((fabric.rank, peer)))
    name = group_id_of(f"servers {pair[0]} {pair[1]}")
    core = fabric.create_group(name, 1, membership, pair, PATIENCE_S)
    # By name: a server that falls silent without a farewell is missed, in time.
    return Connection(core, pair.index(peer), pair.index(peer))


class PeerConnection:
    """The other server, as this one sees it."""

    def __init__(self, pair: Connection, peer: int) -> None:
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
        self._pair.send_message(message, REQUEST, REQUEST_REST)
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


_ACCUSE_S = 0.5  # how often the coordinator is told of a server that cannot be reached

Arrival = tuple[int, p.AnyMessage, Sequence[torch.Tensor]]  # sender, message, what follows it


class Peers:
    """Lines to other servers, by rank."""

    def __init__(self, on_broken: Callable[[int, str], None]) -> None:
        self._lines: dict[int, PeerConnection] = {}
        self._on_broken = on_broken
        self._broken: dict[int, str] = {}  # whose line broke, and why
        self._accused_s = 0.0
        self._seen_by: dict[int, set[int]] = {}  # by server: workers whose memory it sees

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._lines))

    def add(self, rank: int, pair: Connection) -> None:
        """Use a line that was formed."""
        self._lines[rank] = PeerConnection(pair, rank)

    def remove(self, rank: int) -> None:
        """End a line."""
        self._lines.pop(rank).close()

    def close(self) -> None:
        for line in self._lines.values():
            line.close()

    def works(self) -> Iterator[_core.Work]:
        """What the lines wait for."""
        for line in self._lines.values():
            yield from line.works()

    def hear(
        self, is_due: Callable[[p.AnyMessage], bool], find_landing: FindLanding
    ) -> Iterator[Arrival]:
        """Hand out what others have said."""
        for line in list(self._lines.values()):
            yield from self._hear(line, is_due, find_landing)

    def _hear(
        self,
        line: PeerConnection,
        is_due: Callable[[p.AnyMessage], bool],
        find_landing: FindLanding,
    ) -> Iterator[Arrival]:
        try:
            for message, tensors in line.arrivals(is_due, find_landing):
                if isinstance(message, p.Sees):
                    self._seen_by[line.peer] = set(message.ranks)
                else:
                    yield line.peer, message, tensors
        except (PeerError, BadFrame) as error:
            self._drop(line, error)

    def _drop(self, line: PeerConnection, error: PacelineError) -> None:
        """Note that a line is broken; the coordinator says what follows."""
        if self._lines.get(line.peer) is line:
            self.remove(line.peer)
            self._broken[line.peer], self._accused_s = str(error)[:300], 0.0
            self._on_broken(line.peer, str(error))

    def accused(self, now_s: float, members: Collection[int]) -> list[tuple[int, str]]:
        """Name those who cannot be reached, and why; over and over: the coordinator forgets it with
        every generation that this server adopts, and when it is restarted."""
        self._broken = {rank: why for rank, why in self._broken.items() if rank in members}
        if now_s - self._accused_s < _ACCUSE_S:
            return []
        self._accused_s = now_s
        return list(self._broken.items())

    def sees(self, peer: int, rank: int) -> bool:
        """Say whether another server sees the memory of a worker."""
        return rank in self._seen_by.get(peer, ())

    def tell_sight(self, peers: Iterable[int], generation: int, seen: tuple[int, ...]) -> None:
        """Tell others whose memory this server sees."""
        for peer in peers:
            self.post(peer, p.Sees(-1, generation, seen), ())

    def post(self, peer: int, message: p.AnyMessage, tensors: Sequence[torch.Tensor]) -> None:
        """Send to another server, if there is a line to it."""
        line = self._lines.get(peer)
        if line is not None:
            try:
                line.send(message, tensors)
            except PeerError:  # what is received on it says so too, and is looked after
                return

    def backlog(self, peer: int) -> int:
        """Say how much that server has not taken yet."""
        line = self._lines.get(peer)
        return line.backlog if line is not None else 0
