"""Long waits: a line for a person who wonders why nothing happens, and a report to the launcher.

Notices that name an operation and ranks are known for as long as somebody holds them: a function
that waits has its notice in a variable, and lets go of it when it returns. `WaitWatch` looks at all
that know of waits (the engine, the notices, the coordinator's word on missing ranks), so that the
launcher can ask the missing process where it is.

Threads: `WaitWatch.run` runs in the control thread, which a process that waits leaves free.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from paceline.observe.telemetry.waiting import Waiting, WaitTeller
from paceline.runtime.config import EngineConfig
from paceline.runtime.console import warn

FIRST_S = 2.0  # so often at least a wait comes back to look around
_FURTHER = 3  # times as long until the next notice, as in the engine

_mu = threading.Lock()
_held: weakref.WeakSet[WaitNotice] = weakref.WeakSet()  # guarded by: _mu


class WaitNotice:
    """Says that somebody still waits: after PACELINE_WARN_S (2 s), then after three times as long,
    and so on; `check` is called meanwhile.

    Without text it only is there. `operation`: what it waits in, in few words. `ranks`: for whom,
    and may be set anew. `waited_s`: for so long it has waited already.
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
        """Speak if it is time to; true: it was."""
        if not self._is_known:  # not before: most waits are over before anybody would ask
            self._is_known = True
            with _mu:
                _held.add(self)
        waited_s = self.waited_s
        if waited_s < self._due_after_s:
            return False
        self._due_after_s = further_s(self._due_after_s)
        if self._text:
            warn(f"{self._text} ({waited_s:.0f} s so far)")
        return True


@functools.cache
def warn_s() -> float:
    """Return after how long a wait is told for the first time."""
    return EngineConfig.from_environ().warn_s


def further_s(after_s: float) -> float:
    """Return when a wait is told again that was told after so long."""
    return _FURTHER * after_s


def present_waits() -> list[tuple[str, float, Sequence[int]]]:
    """Return what this process waits in, for how long so far, and for which ranks. Any thread."""
    with _mu:
        held = list(_held)
    return [(notice.operation, notice.waited_s, notice.ranks) for notice in held if notice.ranks]


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
