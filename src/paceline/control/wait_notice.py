"""Long waits: a line on the console while a process waits, and a report to the launcher.

A notice that names an operation and ranks is known while the waiting function holds it in a
variable. `WaitWatch` reads all sources of waits (the engine, the notices, the ranks that have not
joined), so that the launcher can ask the missing process where it is.

Threads: `WaitWatch.run` runs in the control thread, which a waiting process leaves free.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from paceline.observe.telemetry.wait_reports import WaitReport, WaitReporter
from paceline.runtime.config import EngineConfig
from paceline.runtime.console import warn

FIRST_S = 2.0  # a wait checks its notices at least this often
_FACTOR = 3  # each notice comes after 3 x the time of the one before, as in the engine

_mu = threading.Lock()
_held: weakref.WeakSet[WaitNotice] = weakref.WeakSet()  # guarded by: _mu


class WaitNotice:
    """Warns about a long wait: after PACELINE_WARN_S (2 s), then after 3 x that time, and so on.
    The waiting function calls `check` meanwhile.

    Without text nothing is printed. `operation`: what the process waits in, in a few words.
    `ranks`: which ranks it waits for; may be changed. `waited_s`: how long it has waited already.
    """

    def __init__(
        self, text: str, operation: str = "", ranks: Sequence[int] = (), waited_s: float = 0.0
    ) -> None:
        self.operation, self.ranks = operation, tuple(ranks)
        self._text = text
        self._start_s = time.monotonic() - waited_s
        self._due_after_s = warn_s()
        self._is_known = not operation

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._start_s

    def check(self) -> bool:
        """Print the warning if it is due; return whether it was."""
        if not self._is_known:  # not before: most waits are short
            self._is_known = True
            with _mu:
                _held.add(self)
        waited_s = self.waited_s
        if waited_s < self._due_after_s:
            return False
        self._due_after_s = next_warn_s(self._due_after_s)
        if self._text:
            warn(f"{self._text} ({waited_s:.0f} s so far)")
        return True


@functools.cache
def warn_s() -> float:
    """Return after how long the first warning about a wait is due."""
    return EngineConfig.from_environ().warn_s


def next_warn_s(after_s: float) -> float:
    """Return after how long the next warning is due, if the last one was due after `after_s`."""
    return _FACTOR * after_s


def present_waits() -> list[tuple[str, float, Sequence[int]]]:
    """Return the operation, duration and awaited ranks of each wait of this process. Any thread."""
    with _mu:
        held = list(_held)
    return [(notice.operation, notice.waited_s, notice.ranks) for notice in held if notice.ranks]


Wait: TypeAlias = tuple[str, float, Sequence[int]]  # operation, seconds, for which ranks
Source: TypeAlias = Callable[[], Iterable[Wait]]

_OFTEN_S = 1.0


class WaitWatch:
    """Reports the waits of one process that last longer than `warn_s`."""

    def __init__(self, rank: int, report: Callable[[WaitReport], None], warn_s: float) -> None:
        self.sources: list[Source] = [present_waits]
        self._rank, self._warn_s = rank, warn_s
        self._wait_reporter = WaitReporter(report)

    async def run(self) -> None:
        """Check again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(min(_OFTEN_S, self._warn_s / 2))
            self.check()

    def check(self) -> None:
        """Report what has changed since the last check."""
        found = [wait for source in self.sources for wait in source()]
        self._wait_reporter.update(
            WaitReport(self._rank, operation, tuple(ranks), waited_s)
            for operation, waited_s, ranks in found
            if ranks and waited_s >= self._warn_s
        )
