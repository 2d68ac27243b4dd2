"""The arithmetic of portions, of parts by speed and cost, and of what is measured."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.cursor.leased import MOST, cut_portions
from paceline.data.split.dynamic import Balance, describe
from paceline.data.split.weights import Costs, balanced, cut_by_cost
from paceline.errors import UsageError

costs = st.lists(st.floats(0, 100), max_size=300)
speeds = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)


@given(costs, st.integers(1, 9))
def test_portions_cover_everything_once_and_shrink(prices: list[float], workers: int) -> None:
    portions = cut_portions(prices, workers)
    assert list(chain.from_iterable(portions)) == list(range(len(prices)))
    left = sum(prices)
    for portion in portions:
        price = sum(prices[place] for place in portion)
        assert 1 <= len(portion) <= MOST
        assert len(portion) == 1 or price <= left / (4 * workers) + 1e-6
        left -= price


@given(st.integers(1, 200), st.integers(1, 4), st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_all_workers_end_at_the_same_time(batches: int, workers: int, slowness: list[int]) -> None:
    """Workers of different speeds take portions when they are free: the last worker
    ends at most one batch of the slowest, and its portion, after the ideal."""
    free = [0.0] * workers
    for portion in cut_portions([1.0] * batches, workers):
        first = free.index(min(free))
        free[first] += len(portion) * slowness[first]
    ideal = batches / sum(1 / slow for slow in slowness[:workers])
    assert max(free) <= 1.3 * ideal + 2 * max(slowness)


@given(st.data(), speeds)
def test_parts_by_speed_cover_everything_and_are_fair(data: Any, fast: list[float]) -> None:
    prices = data.draw(st.lists(st.floats(0.01, 10), min_size=len(fast), max_size=60))
    edges = balanced(prices, fast)
    assert edges[0] == 0 and edges[-1] == len(prices)
    assert all(a < b for a, b in pairwise(edges)), "each worker has a sample"
    if min(fast) == max(fast) and min(prices) == max(prices):
        sizes = [b - a for a, b in pairwise(edges)]
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 6), st.lists(st.floats(0.1, 9), min_size=1, max_size=40))
def test_the_union_of_parts_by_cost_is_the_batch(workers: int, prices: list[float]) -> None:
    units = np.random.default_rng(len(prices)).permutation(len(prices))
    cut = cut_by_cost(Costs(prices, len(prices)))
    parts = [cut(units, workers, rank) for rank in range(workers)]
    assert list(chain(*(part for part, weight in parts if weight))) == units.tolist()
    assert sum(weight for _, weight in parts) == pytest.approx(workers)


def test_costs_are_asked_for_once_and_checked() -> None:
    asked = []

    def cost(index: int) -> float:
        asked.append(index)
        return index + 1

    found = Costs(cost, 5)
    assert found.of([4, 0]).tolist() == [5, 1] and asked == [0, 1, 2, 3, 4]
    assert found.digest == Costs([1, 2, 3, 4, 5], 5).digest != Costs([1, 2, 3, 4, 6], 5).digest
    with pytest.raises(UsageError, match="has no length"):
        Costs(cost, None)
    with pytest.raises(UsageError, match="of sample 1 is inf"):
        Costs([1.0, float("inf")], 2)


class FixedGroup:
    """A group that gathers the seconds that the test sets."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.size, self.ranks = seconds, len(seconds), list(range(len(seconds)))

    def all_gather(self, mine: Any, out: Any) -> None:
        for index, each in enumerate(self.seconds):
            out[index] = each


def test_another_split_needs_a_clear_gain_and_applies_from_a_batch_on() -> None:
    balance, logged = Balance(2), list[str]()
    balance.begin()
    group: Any = FixedGroup([1.0, 1.04])
    balance.exchange(group, 6, 64, logged.append)
    assert balance.speeds == [1.0, 1.0] and not logged, "not worth it"
    group = FixedGroup([1.0, 2.0])
    balance.exchange(group, 10, 64, logged.append)
    assert balance.speeds_at(9) == [1.0, 1.0] and balance.speeds_at(10) == [1.0, 0.5]
    assert logged == ["shard: rank 1 takes 21 of 64 samples: 2.0 x slower than the fastest"]
    balance.exchange(FixedGroup([1.0, 2.06]), 20, 64, logged.append)  # type: ignore[arg-type]
    assert balance.speeds_at(30) == [1.0, 0.5] and len(logged) == 1, "it does not oscillate"
    balance.exchange(FixedGroup([0.0, 9.0]), 20, 64, logged.append)  # type: ignore[arg-type]
    assert balance.speeds_at(30) == [1.0, 0.5], "a worker has measured nothing"
    balance.begin()
    assert balance.speeds_at(0) == [1.0, 0.5], "the next epoch begins with it"
    assert "equal parts" in describe([4, 4], [1.0, 0.95], [0, 1])
