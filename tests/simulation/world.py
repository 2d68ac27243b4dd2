"""A world in which nothing happens by chance: a virtual clock and a queue of events.

Everything that could differ between two runs is drawn from the seed, by named STREAMS: leaving out
a fault (to find which of them matter) then changes nothing about what the others draw. The same
seed gives the same story, event by event, on every machine.

What happens is told to the CHRONICLE, which is only put into words when somebody wants to read it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any


class Violation(AssertionError):
    """Something happened that must never happen."""


class World:
    """The clock, the queue, the dice and the chronicle."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.num_events = 0
        self.chronicle: list[tuple[float, str, str, tuple[Any, ...]]] = []
        self.watchers: list[Callable[[], None]] = []  # called after every event
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def stream(self, name: str) -> random.Random:
        """Return dice of that name: what they show depends on it and on the seed only."""
        return random.Random(f"{self.seed}/{name}")

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Have something happen in so many seconds; at one moment, in the order of these calls."""
        self._order += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._order, action, args))

    def say(self, who: str, text: str, *args: Any) -> None:
        """Tell the chronicle, in words with {} for the arguments."""
        self.chronicle.append((self.now_s, who, text, args))

    def run(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until that moment, until it is over, or until nothing is left to happen."""
        while self._queue and self._queue[0][0] <= until_s and not is_over():
            self.now_s, _, action, args = heapq.heappop(self._queue)
            self.num_events += 1
            action(*args)
            for watch in self.watchers:
                watch()
        if not is_over():
            self.now_s = max(self.now_s, until_s)

    def story(self, last: int | None = None) -> str:
        """Put the chronicle into words; `last`: only so many lines."""
        lines = [
            f"{at_s:9.4f}  {who:<14} {text.format(*args)}"
            for at_s, who, text, args in self.chronicle
        ]
        if last is not None and len(lines) > last:
            lines = [f"... {len(lines) - last} lines before ...", *lines[-last:]]
        return "\n".join(lines)
