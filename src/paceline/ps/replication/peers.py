"""The connections to other servers, and the workers whose memory each of them sees.

There is one connection to each server, for all partitions that both have copies of, as long as both
are in the job. Messages are handled strictly in order, each with the tensors that follow it: the
effect of a message may decide where the tensors of the next one land.

Threads: connections are formed in helper threads; then the loop of the process calls
(ps/server/process.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from paceline import _core
from paceline.comm.fabric import Fabric, group_id_of
from paceline.comm.lazy_channels import POINT_TO_POINT
from paceline.control.member import Membership
from paceline.errors import BadFrame, PacelineError, PeerError, PeerTimeout
from paceline.ps.connection import PATIENCE_S, REQUEST, REQUEST_REST, Connection, Inbox, payload_tag
from paceline.ps.replication import messages as p

_UNREAD = 1 << 16  # messages that the other server has not taken

FindLanding = Callable[[p.AnyMessage], Sequence[torch.Tensor]]


def form_peer_connection(fabric: Fabric, membership: Membership, peer: int) -> Connection:
    """Form this process's end of a connection. Blocks until the other end is formed."""
    fabric.link(membership.member(peer))
    pair = tuple(sorted((fabric.rank, peer)))
    name = group_id_of(f"servers {pair[0]} {pair[1]}")
    core = fabric.create_group(name, 1, membership, pair, PATIENCE_S, POINT_TO_POINT)
    # From this rank, not from any: so a server that stops without a goodbye is noticed.
    return Connection(core, pair.index(peer), pair.index(peer))


class PeerConnection:
    """This server's end of a connection to another server."""

    def __init__(self, pair: Connection, peer: int) -> None:
        self.peer = peer
        self._pair = pair
        self._inbox = Inbox(pair)
        self._sent = self._taken = 0  # messages: their tensors have tags by number
        self._message: p.AnyMessage | None = None  # the next one
        self._is_landing = False  # the receives of its tensors are posted
        self._tensors: Sequence[torch.Tensor] = ()
        self._receiving: list[_core.Work] = []

    def works(self) -> Iterator[_core.Work]:
        """Yield what this connection waits for."""
        if self._message is None:
            yield self._inbox.work
        for work in self._receiving:
            if not work.done():
                yield work

    def arrivals(
        self, is_due: Callable[[p.AnyMessage], bool], find_landing: FindLanding
    ) -> Iterator[tuple[p.AnyMessage, Sequence[torch.Tensor]]]:
        """Yield what has arrived completely and is due. PeerError: the connection is broken."""
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
        """Send a message; its tensors must not change until the other server has them."""
        self._pair.send_message(message, REQUEST, REQUEST_REST)
        for number, tensor in enumerate(tensors):
            self._pair.send(tensor, payload_tag(self._sent, number))
        self._sent += 1
        if self.backlog > _UNREAD:
            raise PeerTimeout(f"rank {self.peer} has not read {_UNREAD} messages", rank=self.peer)

    @property
    def backlog(self) -> int:
        """The number of messages and tensors that the other server has not taken yet."""
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


_REPORT_S = 0.5  # how often an unreachable server is reported to the coordinator

PeerArrival = tuple[int, p.AnyMessage, Sequence[torch.Tensor]]  # sender, message, what follows it


class Peers:
    """The connections to other servers, by rank."""

    def __init__(self, on_broken: Callable[[int, str], None]) -> None:
        self._connections: dict[int, PeerConnection] = {}
        self._on_broken = on_broken
        self._broken: dict[int, str] = {}  # by rank: why its connection broke
        self._reported_s = 0.0
        self._seen_by: dict[int, set[int]] = {}  # by server: workers whose memory it sees

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._connections))

    def add(self, rank: int, pair: Connection) -> None:
        """Use a connection that was formed."""
        self._connections[rank] = PeerConnection(pair, rank)

    def remove(self, rank: int) -> None:
        """End a connection."""
        self._connections.pop(rank).close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def works(self) -> Iterator[_core.Work]:
        """Yield what the connections wait for."""
        for connection in self._connections.values():
            yield from connection.works()

    def receive(
        self, is_due: Callable[[p.AnyMessage], bool], find_landing: FindLanding
    ) -> Iterator[PeerArrival]:
        """Yield what other servers have sent."""
        for connection in list(self._connections.values()):
            yield from self._receive(connection, is_due, find_landing)

    def _receive(
        self,
        connection: PeerConnection,
        is_due: Callable[[p.AnyMessage], bool],
        find_landing: FindLanding,
    ) -> Iterator[PeerArrival]:
        try:
            for message, tensors in connection.arrivals(is_due, find_landing):
                if isinstance(message, p.VisibleWorkers):
                    self._seen_by[connection.peer] = set(message.ranks)
                else:
                    yield connection.peer, message, tensors
        except (PeerError, BadFrame) as error:
            self._drop(connection, error)

    def _drop(self, connection: PeerConnection, error: PacelineError) -> None:
        """Note that a connection is broken; the coordinator decides what follows."""
        if self._connections.get(connection.peer) is connection:
            self.remove(connection.peer)
            self._broken[connection.peer], self._reported_s = str(error)[:300], 0.0
            self._on_broken(connection.peer, str(error))

    def unreachable(self, now_s: float, members: Collection[int]) -> list[tuple[int, str]]:
        """Return the servers that cannot be reached, and why. They are reported repeatedly: the
        coordinator forgets it with every generation that this server enters, and when it is
        restarted."""
        self._broken = {rank: why for rank, why in self._broken.items() if rank in members}
        if now_s - self._reported_s < _REPORT_S:
            return []
        self._reported_s = now_s
        return list(self._broken.items())

    def sees(self, peer: int, rank: int) -> bool:
        """Return whether another server sees the memory of a worker."""
        return rank in self._seen_by.get(peer, ())

    def send_visible_workers(
        self, peers: Iterable[int], generation: int, seen: tuple[int, ...]
    ) -> None:
        """Send the workers whose memory this server sees."""
        for peer in peers:
            self.post(peer, p.VisibleWorkers(-1, generation, seen), ())

    def post(self, peer: int, message: p.AnyMessage, tensors: Sequence[torch.Tensor]) -> None:
        """Send to another server, if it is connected."""
        connection = self._connections.get(peer)
        if connection is not None:
            try:
                connection.send(message, tensors)
            except PeerError:  # the receive fails as well, and is handled
                return

    def backlog(self, peer: int) -> int:
        """Return how many messages that server has not taken yet."""
        connection = self._connections.get(peer)
        return connection.backlog if connection is not None else 0
