"""What throughput the delays of the workers allow: a simulation of their waiting, and nothing else.

A worker's STEP is: read the parameters, compute for as long as its next delay says, push. Its CLOCK
counts its pushes. With BOUND s it may read again, which ends the step, as soon as

    the slowest clock >= its own clock - s

so s = 0 is the synchronous server (each step lasts as long as the slowest worker needs), None the
asynchronous one (no worker waits). Server and network take no time here: the difference between a
real run and the prediction is their cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """The steps that each worker ends within the horizon, and when the last of these ends."""

    steps: tuple[int, ...]
    last_s: float

    @property
    def steps_per_s(self) -> float:
        """All workers together."""
        return sum(self.steps) / self.last_s if self.last_s else 0.0


def simulate(
    delays: Sequence[Sequence[float]], bound: int | None, horizon_s: float = math.inf
) -> Forecast:
    """Let each worker go through its delays, until these are used up or the horizon is reached.

    Workers that do exactly the returned numbers of steps never wait for a step that no worker does:
    the pushes of those that were still waiting at the horizon are not counted. They release no
    worker, because a push after which its worker must wait does not raise the slowest clock.
    """
    clocks, ended, last_s = [0] * len(delays), [0] * len(delays), 0.0
    waiting: set[int] = set()
    pushes = [(own[0], worker) for worker, own in enumerate(delays) if own]
    heapq.heapify(pushes)
    while pushes and pushes[0][0] <= horizon_s:
        now_s, pusher = heapq.heappop(pushes)
        clocks[pusher] += 1
        waiting.add(pusher)
        for worker in released(clocks, waiting, bound):
            waiting.remove(worker)
            ended[worker], last_s = clocks[worker], now_s
            if clocks[worker] < len(delays[worker]):
                heapq.heappush(pushes, (now_s + delays[worker][clocks[worker]], worker))
    return Forecast(tuple(ended), last_s)


def released(clocks: Sequence[int], waiting: set[int], bound: int | None) -> list[int]:
    """Return those of the waiting workers that may continue."""
    slowest = min(clocks)
    return sorted(w for w in waiting if bound is None or slowest >= clocks[w] - bound)


def bound_of(pace: str) -> int | None:
    """Return the bound in the name of a pace: ps, async, ssp:3."""
    word, _, number = pace.partition(":")
    bounds = {"ps": 0, "async": None}
    return bounds[word] if word in bounds else int(number)
