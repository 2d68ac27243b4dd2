"""What a copy of a partition has applied: how many entries, and which requests with which answers.

EXACTLY ONCE. (rank, seq) names a request; a client numbers them upwards and sends again, in order,
those without an answer. One that is not above the last is not applied again: its answer is here,
and is made `again`. The newest REMEMBERED answers of a client are kept, so it must have fewer
requests under way.

All copies of a partition have the same of this. A server that is alone keeps these books by itself
(ps/server/server.py); where there are several, replication.py does. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

EMPTY = -1  # the index of a copy that has nothing
REMEMBERED = 1024  # answers of one client

Clients: TypeAlias = dict[int, tuple[int, list[tuple[int, Any]]]]  # rank: last seq, (seq, answer)


@dataclass
class Client:
    """What is remembered of one client."""

    last: int = 0  # the newest request that was applied
    answers: OrderedDict[int, Any] = field(default_factory=OrderedDict)


class Applied:
    """The books of one copy."""

    def __init__(self) -> None:
        self.index = EMPTY  # of the newest entry
        self.clients: dict[int, Client] = {}  # by rank

    def note(self, index: int, rank: int, seq: int) -> None:
        """Count an entry of the log; seq 0: an event, which nobody asked for."""
        self.index = index
        if seq:
            client = self.clients.setdefault(rank, Client())
            client.last = max(client.last, seq)

    def keep(self, rank: int, seq: int, answer: Any) -> None:
        """Remember the answer to a request."""
        answers = self.clients.setdefault(rank, Client()).answers
        answers[seq] = answer
        if len(answers) > REMEMBERED:
            answers.popitem(last=False)

    def has(self, rank: int, seq: int) -> bool:
        """Return whether a request was applied."""
        return rank in self.clients and seq <= self.clients[rank].last

    def is_answered(self, rank: int, seq: int) -> bool:
        """Return whether the answer to a request is remembered."""
        return rank in self.clients and seq in self.clients[rank].answers

    def answer(self, rank: int, seq: int) -> Any:
        """Return the answer that a request was given."""
        return self.clients[rank].answers[seq]

    def answers(self) -> dict[tuple[int, int], Any]:
        """Return all answers that are remembered, by rank and number."""
        clients = self.clients.items()
        return {(rank, seq): one for rank, c in clients for seq, one in c.answers.items()}

    def last_seq(self, rank: int) -> int:
        """Return the number of the newest request of a client that was applied."""
        return self.clients[rank].last if rank in self.clients else 0

    def forget(self, rank: int) -> None:
        """Drop what is remembered of a client that is gone; while an entry is applied."""
        self.clients.pop(rank, None)

    def clear(self) -> None:
        """Have nothing."""
        self.index = EMPTY
        self.clients.clear()

    def outline(self) -> Clients:
        """Return what is remembered of all clients, for another copy."""
        return {r: (c.last, list(c.answers.items())) for r, c in self.clients.items()}

    def restore(self, index: int, clients: Mapping[int, tuple[int, list[tuple[int, Any]]]]) -> None:
        """Take over from another copy."""
        self.index = index
        self.clients = {r: Client(last, OrderedDict(one)) for r, (last, one) in clients.items()}
