"""A worker that computes as if its processor was slower: it sleeps before each backward pass.

It sleeps for the rest of what its own computation would take, measured from one backward pass to
the next, without waits for other processes, without input and without the sleep itself. The sleep
is before the gradients, so the other workers notice it as they notice a slow computer.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

import torch

from paceline.observe.telemetry.reporter import Reporter

_REMEMBERED = 5  # passes: one that was slow by accident must not prolong the next


class SlowWorker:
    """Sleeps; `factor` is how many times as long the computation takes with it."""

    def __init__(self, factor: float, reporter: Reporter) -> None:
        self._factor, self._reporter = factor, reporter
        self._computed: deque[float] = deque(maxlen=_REMEMBERED)
        self._before: tuple[float, float] | None = None  # time, and what does not count

    def pause(self, loss: torch.Tensor | None) -> None:
        """Sleep before a backward pass."""
        del loss
        idle_s = self._reporter.waited_s + self._reporter.input_s
        now_s = time.monotonic()
        if self._before is not None:
            begin_s, idle_before_s = self._before
            self._computed.append(max(0.0, now_s - begin_s - (idle_s - idle_before_s)))
            time.sleep((self._factor - 1) * statistics.median(self._computed))
        self._before = (time.monotonic(), idle_s)
