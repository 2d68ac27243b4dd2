"""Which connections to workers have something to handle, found without looking at all of them.

Each receive that a connection posts is added to the engine's COMPLETIONS under the number of the
connection. When it finishes, the connection is DUE: its server handles it in its next turn. So a
turn costs what has arrived, however many workers are connected. Connections are served in the order
in which they became due, each for a limited number of requests; one that has more is due again,
after the others.

Threads: the server's loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from paceline import _core
from paceline.ps.connection import Connection, WorkerConnection

Due = dict[WorkerConnection, None]  # an ordered set


class Arrivals:
    """What has arrived on the connections of all partitions of a process."""

    def __init__(self, engine: _core.Engine) -> None:
        self._completions = _core.Completions(engine)
        self._numbers = itertools.count()
        self._watched: dict[int, tuple[WorkerConnection, Due]] = {}

    def watch(self, pair: Connection, rank: int, due: Due) -> WorkerConnection:
        """Return the server's end of this connection; it is due whenever something has arrived."""
        number = next(self._numbers)
        pair.on_receive = partial(self._completions.add, number=number)
        self._watched[number] = (connection := WorkerConnection(pair, rank, number)), due
        due[connection] = None
        return connection

    def forget(self, connection: WorkerConnection) -> None:
        """Ignore a connection from now on."""
        self._watched.pop(connection.number, None)

    def wait(self, others: Sequence[_core.Work], timeout_s: float) -> None:
        """Wait until a connection is due, or one of the other works is done."""
        for number in self._completions.wait(others, timeout_s):
            if number in self._watched:
                connection, due = self._watched[number]
                due[connection] = None
