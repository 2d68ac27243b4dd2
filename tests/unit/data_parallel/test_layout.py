"""Buckets and segments: pure functions of the parameters, the same on every worker."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data_parallel.bucket import NamedParameter, is_dense, lay_out, plan_buckets

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def make(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[NamedParameter]:
    return [
        NamedParameter(f"p{i}", torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]


parameters = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=30,
).map(lambda pairs: make([s for s, _ in pairs], [d for _, d in pairs]))


def num_bytes(named: NamedParameter) -> int:
    return named.param.numel() * named.param.element_size()


@given(parameters, st.integers(1, 4000), st.integers(1, 400))
def test_every_parameter_is_in_one_bucket_of_its_dtype(params, limit, first):
    plan = plan_buckets(params, limit, first)
    assert sorted(n.name for bucket in plan for n in bucket) == sorted(n.name for n in params)
    for bucket in plan:
        assert len({named.param.dtype for named in bucket}) == 1
        assert len(bucket) == 1 or sum(map(num_bytes, bucket)) <= max(limit, first)


@given(parameters, st.integers(1, 4000))
def test_buckets_keep_the_reverse_order_within_a_dtype(params, limit):
    plan = plan_buckets(params, limit, limit)
    for dtype in DTYPES:
        planned = [n.name for bucket in plan for n in bucket if n.param.dtype is dtype]
        assert planned == [n.name for n in reversed(params) if n.param.dtype is dtype]


@given(parameters)
def test_places_start_on_cache_lines_and_do_not_overlap(params):
    same = [named for named in params if named.param.dtype is params[0].param.dtype]
    segments, size = lay_out(same)
    end = 0
    for where in segments:
        assert where.start >= end
        assert where.start * where.named.param.element_size() % 64 == 0
        end = where.start + where.count
    assert end <= size


def test_a_place_keeps_the_strides_of_a_channels_last_parameter():
    weight = torch.nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    (where,), size = lay_out([NamedParameter("weight", weight)])
    flat = torch.zeros(size)
    view = where.view(flat)
    view.copy_(weight.detach())
    assert view.stride() == weight.stride() and torch.equal(view, weight)
    assert torch.equal(flat[: weight.numel()], weight.detach().permute(0, 2, 3, 1).flatten())


def test_dense_means_without_gaps_and_overlaps():
    assert is_dense(torch.zeros(3, 4)) and is_dense(torch.zeros(3, 4).t())
    assert is_dense(torch.zeros(())) and is_dense(torch.zeros(2, 1, 3).transpose(0, 2))
    assert not is_dense(torch.zeros(3, 4)[:, :2])
    assert not is_dense(torch.zeros(3, 1).expand(3, 4))
