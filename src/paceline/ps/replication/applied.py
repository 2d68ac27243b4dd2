"""What a copy of a partition has applied: how many entries, and which requests with which answers.

EXACTLY ONCE. (rank, seq) names a request. A client numbers its requests upwards and sends those
without an answer again, in order. A request whose number is not above the last is not applied
again: its answer is here, and is made `again`. The newest REMEMBERED answers of a client are kept,
so it must have fewer requests pending.

All copies of a partition have equal records. A server without backups updates them itself
(ps/server/server.py); otherwise replication.py does. Pure.
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
class ClientRecord:
    """The last request of one client, and its newest answers."""

    last: int = 0  # the newest request that was applied
    answers: OrderedDict[int, Any] = field(default_factory=OrderedDict)


class Applied:
    """The records of one copy."""

    def __init__(self) -> None:
        self.index = EMPTY  # of the newest entry
        self.clients: dict[int, ClientRecord] = {}  # by rank

    def note(self, index: int, rank: int, seq: int) -> None:
        """Count an entry of the log; seq 0: an event, which is no request."""
        self.index = index
        if seq:
            client = self.clients.setdefault(rank, ClientRecord())
            client.last = max(client.last, seq)

    def keep(self, rank: int, seq: int, answer: Any) -> None:
        """Remember the answer to a request."""
        answers = self.clients.setdefault(rank, ClientRecord()).answers
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
        """Return all remembered answers, by rank and number."""
        clients = self.clients.items()
        return {(rank, seq): one for rank, c in clients for seq, one in c.answers.items()}

    def last_seq(self, rank: int) -> int:
        """Return the number of the newest request of a client that was applied."""
        return self.clients[rank].last if rank in self.clients else 0

    def forget(self, rank: int) -> None:
        """Drop the record of a client that has left; called while an entry is applied."""
        self.clients.pop(rank, None)

    def clear(self) -> None:
        """Forget everything."""
        self.index = EMPTY
        self.clients.clear()

    def outline(self) -> Clients:
        """Return the records of all clients, for another copy."""
        return {r: (c.last, list(c.answers.items())) for r, c in self.clients.items()}

    def restore(self, index: int, clients: Mapping[int, tuple[int, list[tuple[int, Any]]]]) -> None:
        """Replace the records by those of another copy."""
        self.index = index
        self.clients = {
            r: ClientRecord(last, OrderedDict(one)) for r, (last, one) in clients.items()
        }
