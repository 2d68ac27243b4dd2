"""batch="auto": workers of different speeds get parts of different sizes of each global batch.

Each worker measures the seconds that a sample takes it, without the time for which it waits for
others. Every so often all of them tell each other, and if another cut would make the steps clearly
shorter, it holds from a batch on that no worker's loader has asked for yet. The global batch is the
same samples whatever the cut; parts are weighted by their samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Row
from statistics import median
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.data.cursor.cursor import Ranks
from paceline.data.cursor.indices import IndexCursor, Rules, Sequence
from paceline.data.cursor.passes import Pass
from paceline.data.sources.indexed import BatchMaker, IndexedPass
from paceline.data.split.order import KeptOrder, LocalOrder
from paceline.data.split.plan import Plan
from paceline.data.split.weights import Costs, Units, balanced, spread, weight

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


class BalancedCursor(IndexCursor):
    """Cuts global batches by speed and cost."""

    def __init__(
        self, rules: Rules, order: Sequence, members: Ranks, balance: Balance, costs: Costs | None
    ) -> None:
        super().__init__(rules, order, members)
        self._balance, self._costs = balance, costs
        self.costs: dict[int, float] = {}  # by batch on its way, if everybody has something of it

    def cut(self, batch: int, units: Units, rank: int) -> tuple[Any, float]:
        """Return a worker's part of a batch with these units, and its weight."""
        workers = len(self.members)
        place = self.members.index(rank)
        if len(units) < workers:
            return spread(units, workers, place)
        costs = _costs_of(units, self._costs)
        start, stop = balanced(costs, self._balance.speeds_at(batch))[place : place + 2]
        self.costs[batch] = sum(costs[start:stop])
        return units[start:stop], weight(stop - start, len(units), workers)


class BalancedPass(IndexedPass):
    """A pass in which this worker measures how fast it is. Its workers stay."""

    def __init__(self, this: Pass, loader: BatchMaker, plan: Plan, balance: Balance) -> None:
        self._balance, self._size = balance, plan.per_step
        super().__init__(this, loader, plan, this.group)
        balance.begin()

    def _make_cursor(self, plan: Plan, order: LocalOrder | KeptOrder) -> BalancedCursor:
        rules, members = plan.rules(self._this.resize), self._this.members
        self._cut = BalancedCursor(rules, order, members, self._balance, plan.costs)
        return self._cut

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Measure how long a batch takes from one to the next, without waiting for others."""
        reporter = self._this.job.reporter
        while True:
            start_s, waited_s = time.perf_counter(), reporter.waited_s
            batch = next(batches, self)
            if batch is self:
                return
            yield batch
            del batch
            took_s = time.perf_counter() - start_s - (reporter.waited_s - waited_s)
            number = self._cursor.position - 1
            cost = self._cut.costs.pop(number, None)
            if cost is not None:  # alike on all workers
                self._balance.measure(cost, took_s)
                if self._balance.is_due:
                    first = number + 2 + self._this.lookahead
                    self._balance.agree(self._this.group, first, self._size, self._this.say)


def describe(sizes: Row[int], speeds: Row[float], ranks: Row[int]) -> str:
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


def _sizes(size: int, speeds: Row[float]) -> list[int]:
    edges = balanced([1.0] * size, speeds)
    return [stop - start for start, stop in zip(edges, edges[1:], strict=False)]


def _longest(sizes: Row[int], seconds: Row[float]) -> float:
    return max(size * each for size, each in zip(sizes, seconds, strict=True))


def _differ(before: Row[int], after: Row[int]) -> bool:
    """Whether somebody's part has changed by a quarter, which is worth a line."""
    return any(abs(a - b) > 0.25 * b for a, b in zip(after, before, strict=True))
