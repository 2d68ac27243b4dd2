"""batch="auto": workers of different speeds get parts of different sizes of each global batch.

Each worker measures the seconds that a sample takes it, without the time for which it waits for
others. Every so often all of them tell each other, and if another cut would make the steps clearly
shorter, it holds from a batch on that no worker's loader has asked for yet. The global batch is the
same samples whatever the cut; parts are weighted by their samples.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from paceline.collectives.group import Group
from paceline.contribution import Announcer
from paceline.data.costs import Costs
from paceline.data.indexed import IndexedLoader, Parts
from paceline.data.order import Order
from paceline.data.plan import Plan
from paceline.data.split import Units, balanced, spread, weight

_FIRST, _MOST = 4, 32  # batches between two agreements: at first, and at most
_GAIN = 0.05  # so much shorter must steps become for another cut


class Balance:
    """How fast the workers of a loader are; lives as long as the loader."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.speeds = [1.0] * workers  # of one unit of cost per second, in any unit
        self._changes: list[tuple[int, list[float]]] = []  # from which batch of the pass on
        self._measured: list[float] = []  # seconds for a unit of cost, since the last agreement
        self._every, self._since = _FIRST, 0  # batches
        self._is_first = True  # the first batch of all: everything is slow
        self._said: list[int] | None = None

    def begin(self) -> None:
        """A pass begins."""
        self._changes = [(0, self.speeds)]

    def speeds_at(self, batch: int) -> list[float]:
        """Return the speeds that hold for a batch of this pass."""
        return next(speeds for first, speeds in reversed(self._changes) if first <= batch)

    def measure(self, cost: float, took_s: float) -> None:
        """Note how long a batch took this worker."""
        self._since += 1
        if cost > 0 and not self._is_first:
            self._measured.append(max(took_s, 1e-9) / cost)
        self._is_first = False

    @property
    def is_due(self) -> bool:
        """Whether the workers tell each other now; alike on all of them."""
        return self.workers > 1 and self._since >= self._every

    def agree(self, group: Group, first: int, size: int, say: Callable[[str], None]) -> None:
        """Tell how fast this worker is, hear the others, and cut anew from batch `first` on.
        Collective. `size`: samples of a global batch."""
        self._since, self._every = 0, min(2 * self._every, _MOST)
        mine = median(self._measured) if self._measured else 0.0
        self._measured = []
        told = torch.empty(group.size, dtype=torch.float64)
        group.all_gather(torch.tensor([mine], dtype=torch.float64), out=told)
        seconds = told.tolist()
        if min(seconds) <= 0.0:
            return  # somebody had nothing to measure
        wanted = [1.0 / each for each in seconds]
        before, after = (_sizes(size, speeds) for speeds in (self.speeds, wanted))
        if _longest(after, seconds) > (1 - _GAIN) * _longest(before, seconds):
            return
        self.speeds = wanted
        self._changes.append((first, wanted))
        if self._said is None or _differ(self._said, after):
            self._said = after
            say(describe(after, wanted, group.ranks))


class BalancedParts(Parts):
    """One worker's parts of one pass, cut by speed and cost."""

    def __init__(
        self, plan: Plan, order: Order, group: Group, balance: Balance, *, pad: bool, say: Any
    ) -> None:
        super().__init__(plan, order, group.size, group.rank, pad=pad, say=say)
        self._balance = balance
        # Of the parts whose `weights` are there; None: not everybody has something of the batch.
        self.costs: deque[float | None] = deque()

    def _cut(self, units: Units) -> tuple[Any, float]:
        if len(units) < self._world_size:
            part, weighs = spread(units, self._world_size, self._rank)
            if self._pad or weighs:
                self.costs.append(None)
            return part, weighs
        costs = _costs_of(units, self._plan.costs)
        edges = balanced(costs, self._balance.speeds_at(self.steps - 1))
        start, stop = edges[self._rank : self._rank + 2]
        self.costs.append(sum(costs[start:stop]))
        return units[start:stop], weight(stop - start, len(units), self._world_size)


def run_balanced(
    loader: IndexedLoader,
    parts: BalancedParts,
    balance: Balance,
    group: Group,
    announcer: Announcer,
    *,
    lookahead: int,
    worker_seed: int,
    size: int,
    waited_s: Callable[[], float],
    say: Callable[[str], None],
) -> Iterator[Any]:
    """Yield this worker's batches, each with its weight announced, and measure."""
    balance.begin()
    parts.prepare(1 + lookahead)
    batches = loader.begin(parts, worker_seed)
    step = 0
    while True:
        start_s, waited_before_s = time.perf_counter(), waited_s()
        batch = next(batches, parts)
        if batch is parts:
            return
        cost = parts.costs.popleft()
        announcer.set(parts.weights.popleft())
        yield batch
        took_s = time.perf_counter() - start_s - (waited_s() - waited_before_s)
        if cost is not None:  # alike on all workers
            balance.measure(cost, took_s)
            if balance.is_due:
                balance.agree(group, step + 2 + lookahead, size, say)
        parts.prepare(step + 2 + lookahead)
        step += 1


def describe(sizes: Sequence[int], speeds: Sequence[float], ranks: Sequence[int]) -> str:
    """Say who takes how much, and why."""
    fastest, fair = max(speeds), sum(sizes) / len(sizes)
    slow = [place for place, size in enumerate(sizes) if size < fair]
    parts = [
        f"rank {ranks[place]} takes {sizes[place]} of {sum(sizes)} samples:"
        f" {fastest / speeds[place]:.1f} x slower"
        for place in slow
    ]
    if not parts:
        return f"shard: all {len(sizes)} workers are about as fast, and take equal parts again"
    return f"shard: {'; '.join(parts)} than the fastest"


def _costs_of(units: Units, costs: Costs | None) -> list[float]:
    return [1.0] * len(units) if costs is None else costs.of(units).tolist()


def _sizes(size: int, speeds: Sequence[float]) -> list[int]:
    edges = balanced([1.0] * size, speeds)
    return [stop - start for start, stop in zip(edges, edges[1:], strict=False)]


def _longest(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    return max(size * each for size, each in zip(sizes, seconds, strict=True))


def _differ(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether somebody's part has changed by a quarter, which is worth a line."""
    return any(abs(a - b) > 0.25 * b for a, b in zip(after, before, strict=True))
