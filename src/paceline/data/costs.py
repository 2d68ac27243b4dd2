"""What samples cost: numbers that say how long one takes, beside another one.

Only their proportions count. A long text may cost its number of letters, a picture its pixels; they
are asked for once, and all workers must have the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from paceline.data.split import Cut, Units, balanced, spread, weight
from paceline.errors import UsageError

GivenCost: TypeAlias = Callable[[int], float] | Sequence[float]


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
    """Return a way to cut global batches into parts that cost the same (see split.py)."""

    def cut(units: Units, world_size: int, rank: int) -> tuple[Any, float]:
        if len(units) < world_size:
            return spread(units, world_size, rank)
        edges = balanced(costs.of(units).tolist(), [1.0] * world_size)
        mine = units[edges[rank] : edges[rank + 1]]
        return mine, weight(len(mine), len(units), world_size)

    return cut
