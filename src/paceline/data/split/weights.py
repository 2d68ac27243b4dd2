"""Whose samples are these, and how much do they weigh: the arithmetic, without any communication.

A GLOBAL BATCH is what one step of all workers is computed from. It comes as UNITS: indices of
samples, or batches of indices that a batch sampler made, or single items of a loader that does not
batch. Each function below cuts one global batch for one worker and returns that worker's PART and
its weight, samples here x workers / samples of all. A worker for which nothing is left gets a
repeated unit with weight 0.0: it keeps step with the others and changes nothing.

COSTS say how long a sample takes beside another one; only their proportions count. A long text may
cost its number of letters, a picture its pixels; they are asked for once, and all workers must have
the same.
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
    """Return how much a worker's mean counts; 1.0 when all workers have the same."""
    return here * world_size / total if total else 1.0


def balanced(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Cut a row of samples among workers of different speeds, so that all take about as long:
    return where each one's part begins, and the end. Everybody gets one sample at least, of as many
    samples as workers or more.

    >>> balanced([1, 1, 1, 1, 1, 1], [2, 1])
    [0, 4, 6]
    >>> balanced([3, 1, 1, 1], [1, 1])
    [0, 1, 4]
    """
    count, workers = len(costs), len(speeds)
    behind = list(accumulate(costs, initial=0.0))
    scale = behind[-1] / sum(speeds)
    edges = [0]
    for rank, reached in enumerate(accumulate(speeds[:-1]), 1):
        target = reached * scale
        edge = bisect_left(behind, target)
        if edge > 0 and target - behind[edge - 1] < behind[min(edge, count)] - target:
            edge -= 1
        edges.append(max(edges[-1] + 1, min(edge, count - (workers - rank))))
    return [*edges, count]


def num_steps(units: int, per_step: int, *, drop_short: bool) -> int:
    """Return how many global batches a number of units makes."""
    return units // per_step if drop_short else -(-units // per_step)


def spread(units: Units, world_size: int, rank: int) -> tuple[Units, float]:
    """Cut a global batch of samples into even parts."""
    count = len(units)
    mine = share(count, world_size, rank)
    if not mine:
        repeated = rank % count
        return units[repeated : repeated + 1], 0.0
    return units[mine.start : mine.stop], weight(len(mine), count, world_size)


def spread_one(units: Units, world_size: int, rank: int) -> tuple[Units, float]:
    """Cut one batch that a batch sampler made."""
    return spread(units[0], world_size, rank)


def deal(units: Units, world_size: int, rank: int) -> tuple[Any, float]:
    """Give whole units, one to each worker; those that are lists count by their length."""
    if rank >= len(units):
        return units[rank % len(units)], 0.0
    return units[rank], weight(size_of(units[rank]), sum(map(size_of, units)), world_size)


def deal_or_spread(units: Units, world_size: int, rank: int) -> tuple[Units, float]:
    """Give each worker one batch; if there are fewer batches than workers, share their samples."""
    if len(units) == world_size:
        return deal(units, world_size, rank)
    return spread(list(chain.from_iterable(units)), world_size, rank)


def counted(units: Units, cut: Cut, world_size: int) -> tuple[int, int]:
    """Return how many samples a global batch has, and how many workers get none of it."""
    total = len(units) if cut is spread else sum(map(size_of, units))
    is_dealt = cut is deal or (cut is deal_or_spread and len(units) == world_size)
    return total, max(0, world_size - (len(units) if is_dealt else total))


def size_of(unit: object) -> int:
    """Return how many samples an index stands for."""
    return len(unit) if isinstance(unit, list) else 1


def stride(world_size: int, rank: int, per_step: int) -> Callable[[int], bool]:
    """Return the test for a position in a stream: is it this worker's?

    Every global batch is dealt out sample by sample: rank, rank + world_size, ... of each.
    """
    return lambda position: position % per_step % world_size == rank


def strided_share(world_size: int, rank: int, per_step: int) -> int:
    """Return how many positions of each global batch `stride` gives to this worker."""
    return len(range(rank, per_step, world_size))


class Costs:
    """The cost of each sample of a dataset."""

    def __init__(self, cost: GivenCost, samples: int | None) -> None:
        if samples is None:
            raise UsageError("cost=...: the dataset has no length: nobody knows its samples")
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
        """Something short that tells whether two workers have the same."""
        return hashlib.sha256(self._numbers.tobytes()).hexdigest()[:16]

    def of(self, units: Units) -> np.ndarray:
        """Return the costs of some samples."""
        return self._numbers[np.asarray(units, dtype=np.int64)]


def cut_by_cost(costs: Costs) -> Cut:
    """Return a way to cut global batches into parts that cost the same."""

    def cut(units: Units, world_size: int, rank: int) -> tuple[Any, float]:
        if len(units) < world_size:
            return spread(units, world_size, rank)
        edges = balanced(costs.of(units).tolist(), [1.0] * world_size)
        mine = units[edges[rank] : edges[rank + 1]]
        return mine, weight(len(mine), len(units), world_size)

    return cut
