"""A stopwatch for what happens many times in a step: it adds up the seconds inside of `with`."""

from __future__ import annotations

import time
from types import TracebackType

from paceline.telemetry.trace import tracer


class Stopwatch:
    """Seconds so far, which only grow: whoever wants those of a step takes the difference.

    May be nested: what is inside counts once. Main thread only.
    """

    __slots__ = ("_depth", "_start_s", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._start_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._start_s = time.perf_counter()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            took_s = time.perf_counter() - self._start_s
            self.seconds += took_s
            if tracer.on:
                tracer.add("wait", time.monotonic() - took_s)
