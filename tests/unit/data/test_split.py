"""The arithmetic of sharing: nothing lost, nothing twice, even, and weighted by samples."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.split.weights import (
    deal,
    deal_or_spread,
    num_steps,
    share,
    spread,
    spread_one,
    stride,
    strided_share,
)

worlds = st.integers(1, 9)
counts = st.integers(0, 200)


@given(counts, worlds)
def test_shares_cover_everything_once_in_rank_order_and_evenly(count: int, world: int) -> None:
    shares = [share(count, world, rank) for rank in range(world)]
    assert list(chain.from_iterable(shares)) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.lists(st.integers(), min_size=1, max_size=60), worlds)
def test_the_union_of_the_parts_is_the_global_batch(batch: list[int], world: int) -> None:
    parts = [spread(batch, world, rank) for rank in range(world)]
    assert list(chain.from_iterable(part for part, weight in parts if weight)) == batch
    assert sum(weight for _, weight in parts) == pytest.approx(world)
    for part, weight in parts:
        assert part, "a worker without a sample repeats one"
        assert set(part) <= set(batch)
        assert weight == (len(part) * world / len(batch) if weight else 0.0)
    assert spread_one([batch], world, 0) == parts[0]


@given(st.integers(1, 8), worlds)
def test_a_full_global_batch_gives_each_worker_its_batch_size(size: int, world: int) -> None:
    batch = list(range(size * world))
    for rank in range(world):
        part, weight = spread(batch, world, rank)
        assert part == batch[rank * size : (rank + 1) * size]
        assert weight == 1.0


batches = st.lists(st.lists(st.integers(), min_size=1, max_size=5), min_size=1, max_size=6)


@given(batches, worlds)
def test_whole_batches_go_to_one_worker_each(made: list[list[int]], world: int) -> None:
    made = made[:world]
    parts = [deal(made, world, rank) for rank in range(world)]
    assert [part for part, weight in parts if weight] == made
    assert sum(weight for _, weight in parts) == pytest.approx(world)
    spreads = [deal_or_spread(made, world, rank) for rank in range(world)]
    if len(made) == world:
        assert spreads == parts
    union = chain.from_iterable(part for part, weight in spreads if weight)
    assert list(union) == list(chain.from_iterable(made))
    assert sum(weight for _, weight in spreads) == pytest.approx(world)


@given(counts, worlds, st.integers(1, 7), st.booleans())
def test_steps_cover_the_samples(count: int, world: int, size: int, drop: bool) -> None:
    steps = num_steps(count, world * size, drop_short=drop)
    assert steps * world * size <= count if drop else steps * world * size >= count
    assert abs(steps * world * size - count) < world * size


@given(counts, worlds, st.integers(1, 30))
def test_strides_deal_out_a_stream(count: int, world: int, per_step: int) -> None:
    per_step = max(per_step, world)
    taken = [
        [position for position in range(count) if stride(world, rank, per_step)(position)]
        for rank in range(world)
    ]
    assert sorted(chain.from_iterable(taken)) == list(range(count))
    sizes = [strided_share(world, rank, per_step) for rank in range(world)]
    assert sum(sizes) == per_step and max(sizes) - min(sizes) <= 1
    for rank in range(world):
        # The k-th batches of all workers are from the k-th global batch.
        for k in range(count // per_step):
            batch = taken[rank][k * sizes[rank] : (k + 1) * sizes[rank]]
            assert all(position // per_step == k for position in batch)
            assert len(batch) == sizes[rank]
