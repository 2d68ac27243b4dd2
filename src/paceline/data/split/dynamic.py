"""mode="dynamic", and batch="auto": a faster worker gets more.

If workers may take different numbers of steps (async and similar paces), they take whole batches
from a common work pool (data/cursor/leased.py). If all workers make each step together, they take
parts of different sizes of each global batch; in an elastic job, by cost alone. So the work follows
the speed at every pace, and each sample still comes once in an epoch.

BALANCE. Each worker measures the seconds per sample, without the time that it waits for other
workers. At intervals all workers exchange their speeds. If another split would make the steps
clearly shorter, it applies from a batch on that no worker's loader has requested yet. The samples
of a global batch do not depend on the split; parts are weighted by their samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Row
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.comm.group import Group
from paceline.data.cursor.cursor import Ranks
from paceline.data.cursor.indices import IndexCursor, Rules, Sequence
from paceline.data.cursor.leased import Batches, LeasedCursor
from paceline.data.data_pass import DataPass
from paceline.data.randomness import mix_seeds
from paceline.data.sources.indexed import BatchMaker, IndexedLoader, IndexedPass, settings_of
from paceline.data.sources.loaders import LoaderRecord
from paceline.data.sources.sources import IndexedSource
from paceline.data.split.order import LocalOrder, SamplerOrder
from paceline.data.split.plan import BatchPlan, DataWarmup, length_of
from paceline.data.split.weights import (
    Costs,
    GivenCost,
    Units,
    balanced,
    num_steps,
    size_of,
    spread,
    weight,
)
from paceline.errors import UsageError
from paceline.runtime.job import Job

_FIRST, _MOST = 4, 32  # batches between two exchanges of speeds: at first, and at most
_GAIN = 0.05  # steps must become shorter by this fraction for another split


class Balance:
    """The measured speeds of the workers; lives as long as the loader."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.speeds = [1.0] * workers  # cost per second, in any unit
        self._changes: list[tuple[int, list[float]]] = []  # first batch in this pass, and speeds
        self._measured: list[float] = []  # seconds per unit of cost, since the last exchange
        self._every, self._since = _FIRST, 0  # batches
        self._is_first = True  # the first batch is slow, and not measured
        self._logged: list[int] | None = None

    def begin(self) -> None:
        """Begin a pass."""
        self._changes = [(0, self.speeds)]

    def speeds_at(self, batch: int) -> list[float]:
        """Return the speeds that apply to a batch of this pass."""
        return next(speeds for first, speeds in reversed(self._changes) if first <= batch)

    def measure(self, cost: float, took_s: float) -> None:
        """Record how long a batch took this worker."""
        self._since += 1
        if cost > 0 and not self._is_first:
            self._measured.append(max(took_s, 1e-9) / cost)
        self._is_first = False

    @property
    def is_due(self) -> bool:
        """Whether the workers exchange speeds now; the same on all workers."""
        return self.workers > 1 and self._since >= self._every

    def exchange(self, group: Group, first: int, size: int, log: Callable[[str], None]) -> None:
        """Exchange speeds, and split differently from batch `first` on if that saves time.
        Collective. `size`: samples of a global batch."""
        self._since, self._every = 0, min(2 * self._every, _MOST)
        mine = median(self._measured) if self._measured else 0.0
        self._measured = []
        gathered = torch.empty(group.size, dtype=torch.float64)
        group.all_gather(torch.tensor([mine], dtype=torch.float64), out=gathered)
        seconds = gathered.tolist()
        if min(seconds) <= 0.0:
            return  # a worker had nothing to measure
        wanted = [1.0 / each for each in seconds]
        before, after = (_sizes(size, speeds) for speeds in (self.speeds, wanted))
        if _longest(after, seconds) > (1 - _GAIN) * _longest(before, seconds):
            return
        self.speeds = wanted
        self._changes.append((first, wanted))
        if self._logged is None or _differ(self._logged, after):
            self._logged = after
            log(describe(after, wanted, group.ranks))


class BalancedCursor(IndexCursor):
    """Splits global batches by speed and cost."""

    def __init__(
        self, rules: Rules, order: Sequence, members: Ranks, balance: Balance, costs: Costs | None
    ) -> None:
        super().__init__(rules, order, members)
        self._balance, self._costs = balance, costs
        self.costs: dict[int, float] = {}  # by batch under way, if every worker has a part of it

    def cut(self, batch: int, units: Units, rank: int) -> tuple[Any, float]:
        """Return a worker's part of a batch with these units, and its weight."""
        workers = len(self.members)
        index = self.members.index(rank)
        if len(units) < workers:
            return spread(units, workers, index)
        costs = _costs_of(units, self._costs)
        start, stop = balanced(costs, self._balance.speeds_at(batch))[index : index + 2]
        self.costs[batch] = sum(costs[start:stop])
        return units[start:stop], weight(stop - start, len(units), workers)


class BalancedPass(IndexedPass):
    """A pass in which this worker measures its speed. The workers do not change."""

    def __init__(
        self, data_pass: DataPass, loader: BatchMaker, plan: BatchPlan, balance: Balance
    ) -> None:
        self._balance, self._size = balance, plan.per_step
        super().__init__(data_pass, loader, plan, data_pass.group)
        balance.begin()

    def _make_cursor(self, plan: BatchPlan, order: LocalOrder | SamplerOrder) -> BalancedCursor:
        rules, members = plan.rules(self._pass.resize), self._pass.members
        self._cut = BalancedCursor(rules, order, members, self._balance, plan.costs)
        return self._cut

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Measure the time from one batch to the next, without waiting for other workers."""
        reporter = self._pass.job.reporter
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
            if cost is not None:  # the same on all workers
                self._balance.measure(cost, took_s)
                if self._balance.is_due:
                    first = number + 2 + self._pass.lookahead
                    self._balance.exchange(self._pass.group, first, self._size, self._pass.log_once)


def describe(sizes: Row[int], speeds: Row[float], ranks: Row[int]) -> str:
    """Return which workers take fewer samples, and why."""
    fastest, fair = max(speeds), sum(sizes) / len(sizes)
    slow = [index for index, size in enumerate(sizes) if size < fair]
    parts = [
        f"rank {ranks[index]} takes {sizes[index]} of {sum(sizes)} samples:"
        f" {fastest / speeds[index]:.1f} x slower"
        for index in slow
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
    """Return whether a part has changed by a quarter, which is worth logging."""
    return any(abs(a - b) > 0.25 * b for a, b in zip(after, before, strict=True))


_BALANCE, _COSTS = "balance", "costs"


class DynamicSource(IndexedSource):
    """A loader whose samples have indices, divided by the speed of the workers."""

    kind = "dynamic"

    def __init__(
        self,
        loader: DataLoader[Any],
        group: Group,
        job: Job,
        record: LoaderRecord,
        mode: str,
        *,
        pad: bool,
        cost: GivenCost | None,
        warmup: tuple[DataWarmup, int] | None,
    ) -> None:
        nominal = job.env.world_size if job.elastic.is_on else group.size
        super().__init__(loader, group, nominal, "worker", pad=pad, warmup=warmup)
        self._job, self._mode = job, mode
        self._nominal = nominal
        self._costs: Costs | None = None
        is_by_sample = self._plan.cut is spread
        if not is_by_sample and (cost is not None or mode != "dynamic"):
            what = "cost=..." if cost is not None else "batch='auto'"
            raise UsageError(
                f"{what} splits batches by sample, but this loader's batches are made by"
                f" {'a batch sampler' if loader.batch_sampler is not None else 'the dataset'}; use"
                " batch_size=..."
            )
        if cost is not None:
            self._costs = _kept_costs(record, cost, length_of(loader.dataset))
            self._plan = replace(self._plan, costs=self._costs)
        if mode != "dynamic" and job.elastic.is_on:
            raise UsageError(
                "batch='auto' in an elastic job: the speeds of workers that join are not measured;"
                " use batch='global', or a job without --min, --max and --on-loss"
            )
        if (
            mode == "dynamic"
            and job.elastic.is_on
            and not (job.elastic.is_lockstep or self._is_leased)
        ):
            raise UsageError(
                "mode='dynamic' in an elastic job needs a lockstep pace, or one without any bound"
                " (async): with ssp and backup no worker may take many more steps than another;"
                " use mode='shard'"
            )
        if self._is_leased:
            self._check_sampler()
            self.length = None  # depends on the speeds

    @property
    def _is_leased(self) -> bool:
        return self._mode == "dynamic" and self._job.elastic.may_diverge

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that determine the split."""
        costs = None if self._costs is None else self._costs.digest
        return {**super().facts, "cost": costs, "leases": self._is_leased}

    def batches(self, data_pass: DataPass) -> Iterator[Any]:
        """Yield this worker's batches."""
        if self._is_leased:
            self._before_pass(data_pass)
            yield from self._leased_batches(data_pass)
        elif self._is_measured:
            self._before_pass(data_pass)
            # Only the split follows the speeds: each global batch has the same samples.
            balance = self._balance(data_pass)
            yield from self._batches_of(
                BalancedPass(data_pass, self._maker(data_pass), self._plan, balance)
            )
        else:
            if self._costs is None:
                self._log_even(data_pass)
            yield from super().batches(data_pass)

    @property
    def _is_measured(self) -> bool:
        return not self._job.elastic.is_on and self._plan.cut is spread

    def _log_even(self, data_pass: DataPass) -> None:
        why = "batches are made whole, by a batch sampler or the dataset"
        if self._job.elastic.is_on:
            why = "the speeds of workers that join and leave are not measured"
        data_pass.log_once(
            f"shard: mode='dynamic' splits evenly here: the pace is in lockstep, and {why}"
        )

    # -- in lockstep --------------------------------------------------------------------------

    def _balance(self, data_pass: DataPass) -> Balance:
        known: Balance | None = data_pass.record.kept.get(_BALANCE)
        if known is None or known.workers != data_pass.group.size:
            known = data_pass.record.kept[_BALANCE] = Balance(data_pass.group.size)
        return known

    # -- by leases ----------------------------------------------------------------------------

    def _check_sampler(self) -> None:
        sampler = self._plan.sampler
        if sampler is None:
            return
        if self._plan.units is None:
            raise UsageError(
                f"mode='dynamic' needs the number of samples, but {type(sampler).__name__} has no"
                " length; give it a __len__, or use mode='shard'"
            )
        if self._job.elastic.is_on:
            raise UsageError(
                f"mode='dynamic' in an elastic job with a custom sampler"
                f" ({type(sampler).__name__}), whose order a newcomer cannot know; use shuffle=True"
                " or mode='shard'"
            )

    def _leased_batches(self, data_pass: DataPass) -> Iterator[Any]:
        job, agent, key = self._job, self._job.rendezvous.agent, data_pass.record.key
        assert key is not None, "a loader with indices has a key"
        batches = self._all_batches(data_pass)
        cursor = LeasedCursor(agent, key, batches, self._nominal, is_elastic=data_pass.is_elastic)
        data_pass.open(cursor)  # at its position in a checkpoint, if it continues from one
        if data_pass.is_elastic:
            job.contribution.watch_commits(cursor.on_commit)
            job.elastic.watch_leaving(cursor.return_portions)
        try:
            seed = mix_seeds(data_pass.seed, data_pass.epoch, 1 + job.env.number)
            yield from cursor.run(self._copy(data_pass), data_pass.announcer, seed)
        finally:
            data_pass.close(cursor)
        again = cursor.count_again()
        if again:
            data_pass.log_once(
                f"shard: epoch {data_pass.epoch}: {sum(batches.samples):,} samples, each at least"
                f" once; {again:,} reassigned after a loss"
            )

    def _all_batches(self, data_pass: DataPass) -> Batches:
        plan, size = self._plan, self._plan.per_worker or 1
        assert plan.units is not None, "checked before"
        order = data_pass.order(plan, data_pass.group)
        order.prepare(plan.units)  # collective with a custom sampler: all workers begin the pass
        units = order.units(0, plan.units)
        if not len(units):
            self._refuse_emptiness()
        if plan.cut is not spread:  # each unit is a batch
            samples = [size_of(unit) for unit in units]
            return Batches(units, samples, max(samples), list(map(float, samples)))
        full = num_steps(plan.units, size, drop_short=plan.drop_short)
        parts = [units[number * size : (number + 1) * size] for number in range(full)]
        costs = [
            float(len(part) if self._costs is None else self._costs.of(part).sum())
            for part in parts
        ]
        return Batches(parts, list(map(len, parts)), size, costs)

    def _copy(self, data_pass: DataPass) -> IndexedLoader:
        key = ("indexed", *settings_of(self._loader))
        return data_pass.record.copy_for(key, lambda: IndexedLoader(self._loader))


def _kept_costs(record: LoaderRecord, cost: GivenCost, samples: int | None) -> Costs:
    """Compute costs once per loader. The given object is kept, so that its identity is unique."""
    known = record.kept.get(_COSTS)
    if known is None or known[0] is not cost:
        known = record.kept[_COSTS] = (cost, Costs(cost, samples))
    found: Costs = known[1]
    return found
