"""Tells the launcher for whom this process waits, so that it can ask the missing one where it is.

Several times within the limit it looks at all who know of waits: the engine, the notices of
notice.py, and the coordinator's word on who has not joined yet.

Threads: `run` runs in the control thread, which a process that waits leaves free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from paceline.cluster.notice import present_waits
from paceline.telemetry.waiting import Waiting, WaitTeller

Wait: TypeAlias = tuple[str, float, Sequence[int]]  # operation, seconds, for which ranks
Source: TypeAlias = Callable[[], Iterable[Wait]]

_OFTEN_S = 1.0


class WaitWatch:
    """The long waits of one process, those that last longer than `warn_s`."""

    def __init__(self, rank: int, report: Callable[[Waiting], None], warn_s: float) -> None:
        self.sources: list[Source] = [present_waits]
        self._rank, self._warn_s = rank, warn_s
        self._teller = WaitTeller(report)

    async def run(self) -> None:
        """Look again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(min(_OFTEN_S, self._warn_s / 2))
            self.look()

    def look(self) -> None:
        """Tell what has changed since the last look."""
        found = [wait for source in self.sources for wait in source()]
        self._teller.tell(
            Waiting(self._rank, operation, tuple(ranks), waited_s)
            for operation, waited_s, ranks in found
            if ranks and waited_s >= self._warn_s
        )
