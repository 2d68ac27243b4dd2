"""Who waits for whom at this moment: the event, and the one who tells it.

A process that waits for others longer than a limit tells the launcher: what it waits in, and
without whom it cannot go on. It tells so again when others are missing than before, every few
seconds (who has fallen silent may be out of its wait by now, and stuck elsewhere), and when it is
over: then it waits for no ranks. Servers speak for workers: only they know whose part an answer is
still short of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

AGAIN_S = 5.0
_MOST = 8  # waits of one rank that are told at a time


class Waiting(msgspec.Struct, frozen=True, tag_field="type", tag="waiting"):
    """`rank` has waited `waited_s` in `operation` for others; for none: that wait is over."""

    rank: int
    operation: str
    for_ranks: tuple[int, ...] = ()
    waited_s: float = 0.0
    told_by: int | None = None  # a server that knows for whom its answer waits; None: by itself


class WaitTeller:
    """Turns "these are the long waits now" into events about what has changed. Not thread-safe."""

    def __init__(self, report: Callable[[Waiting], None]) -> None:
        self._report = report
        self._told: dict[tuple[int, str], Waiting] = {}

    def tell(self, waits: Iterable[Waiting]) -> None:
        """Take in all long waits of this moment; report those that began, changed or ended."""
        longest = sorted(waits, key=lambda wait: -wait.waited_s)[:_MOST]
        now = {(wait.rank, wait.operation): wait for wait in reversed(longest)}
        for key, wait in now.items():
            told = self._told.get(key)
            is_known = told is not None and told.for_ranks == wait.for_ranks
            if told is not None and is_known and wait.waited_s < told.waited_s + AGAIN_S:
                now[key] = told
            else:
                self._report(wait)
        for key in self._told.keys() - now.keys():
            rank, operation = key
            self._report(Waiting(rank, operation, told_by=self._told[key].told_by))
        self._told = now
