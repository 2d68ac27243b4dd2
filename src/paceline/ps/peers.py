"""The other servers, as this one can reach them: lines, who sees whose memory, whom to accuse.

Threads: none; the loop of the process (hosting.py) calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from paceline import _core
from paceline.errors import BadFrame, PacelineError, PeerError
from paceline.ps import peer_messages as p
from paceline.ps.line import Pair
from paceline.ps.peer_line import FindLanding, PeerLine

_ACCUSE_S = 0.5  # how often the coordinator is told of a server that cannot be reached

Arrival = tuple[int, p.AnyMessage, Sequence[torch.Tensor]]  # sender, message, what follows it


class Peers:
    """Lines to other servers, by rank."""

    def __init__(self, on_broken: Callable[[int, str], None]) -> None:
        self._lines: dict[int, PeerLine] = {}
        self._on_broken = on_broken
        self._broken: dict[int, str] = {}  # whose line broke, and why
        self._accused_s = 0.0
        self._seen_by: dict[int, set[int]] = {}  # by server: workers whose memory it sees

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._lines))

    def add(self, rank: int, pair: Pair) -> None:
        """Use a line that was formed."""
        self._lines[rank] = PeerLine(pair, rank)

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
        line: PeerLine,
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

    def _drop(self, line: PeerLine, error: PacelineError) -> None:
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
