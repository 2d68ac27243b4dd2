"""The samples and the weight of each worker: arithmetic, without communication.

A GLOBAL BATCH is what one step of all workers is computed from. It consists of UNITS: indices of
samples, batches of indices from a batch sampler, or single items of a loader that does not batch.
Each function below returns one worker's PART of a global batch and its weight: samples here x
workers / samples of all. A worker for which no sample is left gets a repeated unit with weight 0.0:
it takes part in the step, but does not change the result.

COSTS are the relative durations of samples; only their ratios matter. The cost of a long text may
be its number of letters, that of a picture its pixels. They are computed once, and must be the same
on all workers.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np

from paceline.errors import UsageError

Units = Sequence[Any]
Cut = Callable[[Units, int, int], tuple[Any, float]]
GivenCost: TypeAlias = Callable[[int], float] | Sequence[float]


def share(count: int, world_size: int, rank: int) -> range:
    """Return the positions that a rank takes: contiguous, in rank order, as even as possible.

    >>> [list(share(5, 3, rank)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    base, extra = divmod(count, world_size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def weight(here: int, total: int, world_size: int) -> float:
    """Return the weight of a worker's mean; 1.0 if all workers have the same number."""
    return here * world_size / total if total else 1.0


def balanced(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Split a sequence of samples among workers of different speeds, so that all take about as
    long. Return where each part begins, and the end. Each worker gets at least one sample, if there
    are as many samples as workers.

    >>> balanced([1, 1, 1, 1, 1, 1], [2, 1])
    [0, 4, 6]
    >>> balanced([3, 1, 1, 1], [1, 1])
    [0, 1, 4]
    """
    count, workers = len(costs), len(speeds)
    sums = list(accumulate(costs, initial=0.0))
    scale = sums[-1] / sum(speeds)
    edges = [0]
    for rank, reached in enumerate(accumulate(speeds[:-1]), 1):
        target = reached * scale
        edge = bisect_left(sums, target)
        if edge > 0 and target - sums[edge - 1] < sums[min(edge, count)] - target:
            edge -= 1
        edges.append(max(edges[-1] + 1, min(edge, count - (workers - rank))))
    return [*edges, count]


def num_steps(units: int, per_step: int, *, drop_short: bool) -> int:
    """Return how many global batches a number of units makes."""
    return units // per_step if drop_short else -(-units // per_step)


def spread(units: Units, world_size: int, rank: int) -> tuple[Units, float]:
    """Split a global batch of samples into even parts."""
    count = len(units)
    mine = share(count, world_size, rank)
    if not mine:
        repeated = rank % count
        return units[repeated : repeated + 1], 0.0
    return units[mine.start : mine.stop], weight(len(mine), count, world_size)


def spread_one(units: Units, world_size: int, rank: int) -> tuple[Units, float]:
    """Split one batch of a batch sampler."""
    return spread(units[0], world_size, rank)


def deal(units: Units, world_size: int, rank: int) -> tuple[Any, float]:
    """Give one whole unit to each worker; a unit that is a list counts by its length."""
    if rank >= len(units):
        return units[rank % len(units)], 0.0
    return units[rank], weight(size_of(units[rank]), sum(map(size_of, units)), world_size)


def deal_or_spread(units: Units, world_size: int, rank: int) -> tuple[Units, float]:
    """Give each worker one batch; if there are fewer batches than workers, split their samples."""
    if len(units) == world_size:
        return deal(units, world_size, rank)
    return spread(list(chain.from_iterable(units)), world_size, rank)


def counted(units: Units, cut: Cut, world_size: int) -> tuple[int, int]:
    """Return how many samples a global batch has, and how many workers get none of it."""
    total = len(units) if cut is spread else sum(map(size_of, units))
    is_dealt = cut is deal or (cut is deal_or_spread and len(units) == world_size)
    return total, max(0, world_size - (len(units) if is_dealt else total))


def size_of(unit: object) -> int:
    """Return how many samples a unit has."""
    return len(unit) if isinstance(unit, list) else 1


def stride(world_size: int, rank: int, per_step: int) -> Callable[[int], bool]:
    """Return a test whether a position in a stream belongs to this worker.

    A worker gets the samples rank, rank + world_size, ... of every global batch.
    """
    return lambda position: position % per_step % world_size == rank


def strided_share(world_size: int, rank: int, per_step: int) -> int:
    """Return how many positions of each global batch `stride` gives to this worker."""
    return len(range(rank, per_step, world_size))


class Costs:
    """The cost of each sample of a dataset."""

    def __init__(self, cost: GivenCost, samples: int | None) -> None:
        if samples is None:
            raise UsageError(
                "cost=... needs the number of samples, but the dataset has no length; give it a"
                " __len__"
            )
        try:
            given = map(cost, range(samples)) if callable(cost) else cost
            numbers = np.asarray(list(given), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"cost=...: expected a number for each sample, or a function of its index: {error}"
            ) from None
        if numbers.shape != (samples,):
            raise UsageError(
                f"cost=... has {numbers.shape[0]} numbers, expected {samples}: one for each sample"
            )
        wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))
        if len(wrong) or not numbers.sum():
            found = f"of sample {wrong[0]} is {numbers[wrong[0]]}" if len(wrong) else "are all 0"
            raise UsageError(f"cost=...: costs are finite numbers >= 0, but those {found}")
        self._numbers = numbers

    @property
    def digest(self) -> str:
        """A short hash, to compare the costs of two workers."""
        return hashlib.sha256(self._numbers.tobytes()).hexdigest()[:16]

    def of(self, units: Units) -> np.ndarray:
        """Return the costs of some samples."""
        return self._numbers[np.asarray(units, dtype=np.int64)]


def cut_by_cost(costs: Costs) -> Cut:
    """Return a function that splits global batches into parts of equal cost."""

    def cut(units: Units, world_size: int, rank: int) -> tuple[Any, float]:
        if len(units) < world_size:
            return spread(units, world_size, rank)
        edges = balanced(costs.of(units).tolist(), [1.0] * world_size)
        mine = units[edges[rank] : edges[rank + 1]]
        return mine, weight(len(mine), len(units), world_size)

    return cut
