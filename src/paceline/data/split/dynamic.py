"""mode="dynamic", and batch="auto": a worker that is faster gets more.

Where workers may take different numbers of steps (async and the like), they take whole batches from
a common pool: data/cursor/leased.py. Where all of them make each step together, they take parts of
different sizes of each global batch: balance.py; in an elastic job, by cost alone. So what a worker
has to do follows its speed at every pace, and each sample still comes once in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from paceline.comm.group import Group
from paceline.data.cursor.leased import Batches, LeasedCursor
from paceline.data.cursor.passes import Pass
from paceline.data.randomness import mixed
from paceline.data.sources.indexed import IndexedLoader, settings_of
from paceline.data.sources.loaders import Memory
from paceline.data.sources.sources import Indexed
from paceline.data.split.balance import Balance, BalancedPass
from paceline.data.split.plan import DataWarmup, length_of
from paceline.data.split.weights import Costs, GivenCost, size_of, spread
from paceline.errors import UsageError
from paceline.runtime.job import Job

_BALANCE, _COSTS = "balance", "costs"


class Dynamic(Indexed):
    """A loader whose samples have indices, shared out by the speed of the workers."""

    def __init__(
        self,
        loader: DataLoader[Any],
        group: Group,
        job: Job,
        memory: Memory,
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
                f"{what} cuts batches by sample, but this loader's batches are made by"
                f" {'a batch sampler' if loader.batch_sampler is not None else 'the dataset'}; use"
                " batch_size=..."
            )
        if cost is not None:
            self._costs = _costs_of(memory, cost, length_of(loader.dataset))
            self._plan = replace(self._plan, costs=self._costs)
        if mode != "dynamic" and job.elastic.is_on:
            raise UsageError(
                "batch='auto' in an elastic job: workers that come and go have been measured by"
                " nobody; use batch='global', or a job without --min, --max and --on-loss"
            )
        if (
            mode == "dynamic"
            and job.elastic.is_on
            and not (job.elastic.is_lockstep or self._is_leased)
        ):
            raise UsageError(
                "mode='dynamic' in an elastic job needs a pace in which all step together, or one"
                " without any bound (async): with ssp and backup nobody may take many more steps"
                " than another; use mode='shard'"
            )
        if self._is_leased:
            self._refuse_leases()
            self.length = None  # who gets how many is seen at the end

    @property
    def _is_leased(self) -> bool:
        return self._mode == "dynamic" and self._job.elastic.may_part

    @property
    def facts(self) -> dict[str, Any]:
        """Besides, what all must know alike to cut alike."""
        costs = None if self._costs is None else self._costs.digest
        return {**super().facts, "cost": costs, "leases": self._is_leased}

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield this worker's batches."""
        if self._is_leased:
            self._before_pass(this)
            yield from self._leased_batches(this)
        elif self._is_measured:
            self._before_pass(this)
            # The cut follows the speeds, but each global batch is the same samples.
            balance = self._balance(this)
            yield from self._batches_of(BalancedPass(this, self._maker(this), self._plan, balance))
        else:
            if self._costs is None:
                self._say_even(this)
            yield from super().batches(this)

    @property
    def _is_measured(self) -> bool:
        return not self._job.elastic.is_on and self._plan.cut is spread

    def _say_even(self, this: Pass) -> None:
        why = "batches are made whole, by a batch sampler or the dataset"
        if self._job.elastic.is_on:
            why = "the speeds of workers that come and go are not measured"
        this.say(f"shard: mode='dynamic' shares evenly here: all step together, and {why}")

    # -- in step ------------------------------------------------------------------------------

    def _balance(self, this: Pass) -> Balance:
        known: Balance | None = this.memory.kept.get(_BALANCE)
        if known is None or known.workers != this.group.size:
            known = this.memory.kept[_BALANCE] = Balance(this.group.size)
        return known

    # -- by leases ----------------------------------------------------------------------------

    def _refuse_leases(self) -> None:
        told = self._plan.told
        if told is None:
            return
        if self._plan.units is None:
            raise UsageError(
                f"mode='dynamic' must know how much there is, but {type(told).__name__} has no"
                " length; give it a __len__, or use mode='shard'"
            )
        if self._job.elastic.is_on:
            raise UsageError(
                f"mode='dynamic' in an elastic job, with a sampler ({type(told).__name__}) that a"
                " newcomer could not follow; use shuffle=True or mode='shard'"
            )

    def _leased_batches(self, this: Pass) -> Iterator[Any]:
        job, agent, line = self._job, self._job.rendezvous.agent, this.memory.line
        assert line is not None, "a loader with indices has a line"
        batches = self._all_batches(this)
        cursor = LeasedCursor(agent, line, batches, self._nominal, is_elastic=this.is_elastic)
        this.open(cursor)  # where a checkpoint has it, if it is continued from one
        if this.is_elastic:
            job.contribution.watch_commits(cursor.on_commit)
        try:
            seed = mixed(this.seed, this.epoch, 1 + job.env.number)
            yield from cursor.run(self._copy(this), this.announcer, seed)
        finally:
            this.close(cursor)
        again = cursor.count_again()
        if again:
            samples = sum(batches.samples(number) for number in range(batches.count))
            this.say(
                f"shard: epoch {this.epoch}: {samples:,} samples, each at least once;"
                f" {again:,} re-issued"
            )

    def _all_batches(self, this: Pass) -> Batches:
        plan, size = self._plan, self._plan.per_worker or 1
        assert plan.units is not None, "checked before"
        order = this.order(plan, this.group)
        order.prepare(plan.units)  # collective where a sampler is told: all begin the pass
        units = order.units(0, plan.units)
        if not len(units):
            self._refuse_emptiness()
        if plan.cut is not spread:  # each unit is a batch, or stands for one
            costs = [float(size_of(unit)) for unit in units]
            most = int(max(costs))
            return Batches(
                len(units), units.__getitem__, lambda n: int(costs[n]), most, costs.__getitem__
            )
        full = plan.units // size if plan.drop_short else -(-plan.units // size)
        edges = [min(number * size, len(units)) for number in range(full + 1)]
        if self._costs is None:
            prices = [float(b - a) for a, b in zip(edges, edges[1:], strict=False)]
        else:
            prices = [
                float(self._costs.of(units[a:b]).sum())
                for a, b in zip(edges, edges[1:], strict=False)
            ]
        return Batches(
            full,
            lambda number: units[edges[number] : edges[number + 1]],
            lambda number: edges[number + 1] - edges[number],
            size,
            prices.__getitem__,
        )

    def _copy(self, this: Pass) -> IndexedLoader:
        key = ("indexed", *settings_of(self._loader))
        return this.memory.copy_for(key, lambda: IndexedLoader(self._loader))


def _costs_of(memory: Memory, cost: GivenCost, samples: int | None) -> Costs:
    """Ask for costs once for each loader; the given thing is kept, so that its identity holds."""
    known = memory.kept.get(_COSTS)
    if known is None or known[0] is not cost:
        known = memory.kept[_COSTS] = (cost, Costs(cost, samples))
    found: Costs = known[1]
    return found
