"""The largest values of tensors, and indices on the wire."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import _core
from paceline.compress import sparse_format as sparse
from paceline.compress.kernels import Draw
from paceline.errors import BadFrame, UsageError

SEEDS = st.integers(0, 2**32)


@pytest.fixture(params=[False, True], ids=["best kernels", "portable kernels"], autouse=True)
def portable(request):
    _core.use_portable_kernels(request.param)
    yield
    _core.use_portable_kernels(False)


def select(values, k, **options):
    indices, chosen = torch.full((k,), -1, dtype=torch.int32), torch.empty(k)
    sparse.select(values, k, indices, chosen, **options)
    return indices, chosen


def largest(v: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest sizes, of equal ones the first, of NaN by its bits."""
    sizes = v.view(torch.int32) & 0x7FFFFFFF
    return torch.sort(sizes, descending=True, stable=True).indices[:k].sort().values


@settings(deadline=None, max_examples=30)
@given(
    seed=SEEDS,
    count=st.integers(1, 500) | st.sampled_from([32768, 40_000, 140_001]),
    part=st.floats(0, 1) | st.just(0.01),
    equal=st.sampled_from([0, 0, 3, 100]),
    special=st.booleans(),
    threads=st.integers(1, 3),
)
def test_exactly_the_largest_are_selected(seed, count, part, equal, special, threads):
    chance = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=chance)
    if equal:
        values = (values * equal).round() / equal  # many are equal, and many 0
    if special and count > 9:
        values[:5] = torch.tensor([np.nan, np.inf, -np.inf, 1e-45, -1e-45])[torch.randperm(5)]
    k = min(count, round(part * count))
    residual = torch.randn(count, generator=chance) if seed % 2 else torch.zeros(count)
    v = values + residual
    expected = largest(v, k)
    indices, chosen = select(values, k, residual=residual, draw=Draw(seed, 0), threads=threads)
    assert torch.equal(indices.long(), expected)
    assert torch.equal(chosen.view(torch.int32), v[expected].view(torch.int32))
    v[expected] = 0
    assert torch.equal(residual.view(torch.int32), v.view(torch.int32))


@pytest.mark.parametrize("k", [1, 100, 2000, 200_000])
def test_the_set_is_that_of_topk(k):
    values = torch.randperm(200_000).float() - 100_000.5
    before = values.clone()
    indices, chosen = select(values, k)
    assert set(indices.tolist()) == set(values.abs().topk(k).indices.tolist())
    assert torch.equal(chosen, values[indices.long()]) and torch.equal(values, before)


def test_a_sample_may_mislead():
    """The sample of 32768 sees none of 100 large values, then all of the ones it sees are large."""
    values = torch.zeros(1_000_000)
    values[::10_000] = torch.arange(100) + 1.0
    assert select(values, 100)[0].tolist() == list(range(0, 1_000_000, 10_000))
    draw = Draw(5, 6)
    where = torch.empty(32768, dtype=torch.int32)
    sparse.random_indices(1_000_000, 32768, draw, where)
    values = torch.rand(1_000_000)
    values[where.long()] += 100
    assert torch.equal(select(values, 50_000, draw=draw)[0].long(), largest(values, 50_000))


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, count=st.integers(1, 9000) | st.just(140_001), threads=st.integers(1, 3))
def test_sparse_rows_are_averaged(seed, count, threads):
    chance = np.random.default_rng(seed)
    rows, expected = [], torch.zeros(count)
    num_rows = int(chance.integers(1, 5))
    for _ in range(num_rows):
        where = np.sort(chance.choice(count, chance.integers(0, min(count, 300) + 1), False))
        indices = torch.from_numpy(where.astype(np.int32))
        chosen = torch.from_numpy(chance.standard_normal(len(where)).astype(np.float32))
        expected[indices.long()] += chosen / num_rows
        rows.append((indices, chosen))
    out = torch.full((count,), np.nan)
    sparse.scatter_mean(rows, out, threads=threads)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("bad", [[10], [-1], [3, 3], [4, 2], [0, 2**31 - 1]])
def test_indices_of_others_are_checked_before_anything_is_written(bad):
    out = torch.ones(10)
    good = (torch.tensor([1], dtype=torch.int32), torch.ones(1))
    row = (torch.tensor(bad, dtype=torch.int32), torch.ones(len(bad)))
    with pytest.raises(BadFrame, match=f"sparse row 1: index {bad[-1]} at position"):
        sparse.scatter_mean([good, row], out)
    assert (out == 1).all()


@settings(deadline=None, max_examples=30)
@given(
    seed=SEEDS,
    count=st.sampled_from([1, 254, 255, 256, 3000, 65535, 65536, 140_001]),
    part=st.sampled_from([0.0, 0.00001, 0.003, 0.5, 1.0]),
    width=st.sampled_from([1, 2]),
)
def test_gaps_come_back(seed, count, part, width):
    k = round(part * count)
    where = np.sort(np.random.default_rng(seed).choice(count, k, False)).astype(np.int32)
    indices, back = torch.from_numpy(where), torch.full((k,), -1, dtype=torch.int32)
    packed = torch.zeros(sparse.gap_bytes(count, k, width), dtype=torch.uint8)
    used = sparse.pack_gaps(indices, count, packed, width=width)
    assert (packed[used:] == 255).all()
    sparse.unpack_gaps(packed, count, back, width=width)
    assert torch.equal(back, indices)


def test_the_narrower_gaps_are_chosen_where_entries_are_dense():
    for count, k in [(1000, 500), (10**6, 10**4), (10**6, 10**3), (10**8, 10), (10, 0)]:
        sizes = {width: sparse.gap_bytes(count, k, width) for width in (1, 2)}
        assert sizes[sparse.gap_format(count, k)] == min(sizes.values())
    assert sparse.gap_bytes(1000, 10, 1) == 10 + 3 + 1
    assert sparse.gap_bytes(70_000, 10, 2) == 2 * (10 + 1 + 1)


def test_the_bytes_of_gaps():
    indices = torch.tensor([0, 1, 256, 767, 1023], dtype=torch.int32)
    packed = torch.zeros(sparse.gap_bytes(1024, 5, 1), dtype=torch.uint8)
    assert sparse.pack_gaps(indices, 1024, packed, width=1) == 8
    assert packed.tolist() == [0, 0, 254, 255, 255, 0, 255, 0, 255, 255]


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, width=st.sampled_from([1, 2]), changes=st.integers(1, 4))
def test_corrupted_gaps_give_an_error_or_other_indices_never_worse(seed, width, changes):
    count, k, chance = 3000, 40, np.random.default_rng(seed)
    where = np.sort(chance.choice(count, k, False)).astype(np.int32)
    packed = torch.zeros(sparse.gap_bytes(count, k, width), dtype=torch.uint8)
    sparse.pack_gaps(torch.from_numpy(where), count, packed, width=width)
    packed[chance.integers(0, len(packed), changes)] = torch.from_numpy(
        chance.integers(0, 256, changes).astype(np.uint8)
    )
    room = torch.full((k + 64,), -7, dtype=torch.int32)
    try:
        sparse.unpack_gaps(packed, count, room[:k], width=width)
        assert (room[:k].diff() > 0).all() and room[0] >= 0 and room[k - 1] < count
    except BadFrame as error:
        assert "gaps between indices" in str(error)
    assert (room[k:] == -7).all()


def test_gaps_with_too_many_or_too_few_entries_are_refused():
    packed = torch.full((sparse.gap_bytes(100, 3, 1),), 255, dtype=torch.uint8)
    packed[0] = 5
    room = torch.empty(3, dtype=torch.int32)
    with pytest.raises(BadFrame, match="1 entries instead of the expected 3"):
        sparse.unpack_gaps(packed, 100, room, width=1)
    packed[:] = 1
    with pytest.raises(BadFrame, match="more than the expected 3 entries"):
        sparse.unpack_gaps(packed, 100, room, width=1)
    packed[:] = 60
    with pytest.raises(BadFrame, match="index 121 in a tensor of 100 elements"):
        sparse.unpack_gaps(packed, 100, room, width=1)
    with pytest.raises(UsageError, match="packed: expected 4 elements"):
        sparse.unpack_gaps(packed[:-1], 100, room, width=1)


@settings(deadline=None, max_examples=30)
@given(
    seed=SEEDS,
    count=st.integers(1, 5000) | st.just(140_001),
    part=st.floats(0, 1),
    threads=st.integers(1, 3),
)
def test_random_indices_are_one_of_each_stratum(seed, count, part, threads):
    k = max(1, round(part * count))
    found = [torch.empty(k, dtype=torch.int32) for _ in range(3)]
    sparse.random_indices(count, k, Draw(seed, 1, 5), found[0], threads=threads)
    sparse.random_indices(count, k, Draw(seed, 1, 5), found[1])
    sparse.random_indices(count, k, Draw(seed, 2, 5), found[2])
    assert torch.equal(found[0], found[1])
    borders = torch.arange(k + 1) * count // k
    assert (found[0] >= borders[:-1]).all() and (found[0] < borders[1:]).all()
    # 100 strata of 2 or more: equal in two steps with a probability of 2^-100 at most.
    assert count < 2 * k or k < 100 or not torch.equal(found[0], found[2])


def test_random_indices_reach_every_element():
    """An element of a stratum of 10 is missed 400 times with a probability of 0.9^400 = 5e-19."""
    seen = torch.zeros(1000, dtype=torch.int64)
    where = torch.empty(100, dtype=torch.int32)
    for step in range(400):
        sparse.random_indices(1000, 100, Draw(1, step), where)
        seen[where.long()] += 1
    assert seen.min() > 0 and seen.max() < 100  # 40 of them expected, with a deviation of 6


def test_wrong_arguments_are_refused():
    values, indices, chosen = torch.zeros(10), torch.zeros(11, dtype=torch.int32), torch.zeros(11)
    with pytest.raises(UsageError, match="cannot select 11 of 10 elements"):
        sparse.select(values, 11, indices, chosen)
    with pytest.raises(UsageError, match="indices: expected 3 elements, got 11"):
        sparse.select(values, 3, indices, chosen)
    with pytest.raises(UsageError, match="indices: expected torch.int32, got torch.int64"):
        sparse.select(values, 3, indices.long(), chosen)
    with pytest.raises(UsageError, match="width of 1 or 2 bytes, not 4"):
        sparse.gap_bytes(100, 3, 4)
    with pytest.raises(UsageError, match="no rows"):
        sparse.scatter_mean([], values)
    with pytest.raises(BadFrame, match="should lie above"):
        sparse.pack_gaps(
            torch.tensor([5, 4], dtype=torch.int32),
            100,
            torch.empty(sparse.gap_bytes(100, 2, 1), dtype=torch.uint8),
            width=1,
        )
