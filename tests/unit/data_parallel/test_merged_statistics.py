"""Statistics of parts, merged: the same as those of the whole."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data_parallel.model_state.batchnorm import merge

CHANNELS = 3


def row(part: torch.Tensor) -> torch.Tensor:
    """What one rank tells of its batch: count, means, sums of squared distances."""
    if not len(part):
        return torch.zeros(1 + 2 * CHANNELS, dtype=torch.float64)
    mean = part.mean(0)
    return torch.cat([torch.tensor([len(part)]), mean, ((part - mean) ** 2).sum(0)])


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    offset=st.sampled_from([0.0, -3.0, 1e6]),
    seed=st.integers(0, 1000),
)
def test_merging_parts_gives_the_statistics_of_the_whole(sizes, offset, seed):
    random = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(sizes), CHANNELS, dtype=torch.float64, generator=random) + offset
    count, mean, var = merge(torch.stack([row(part) for part in whole.split(sizes)]))
    assert count == sum(sizes)
    if count == 0:
        assert not mean.any() and not var.any()
        return
    # The mean is a float64 near the offset; its rounding moves the distances by as much.
    rounding = 1e-15 * (1 + abs(offset))
    torch.testing.assert_close(mean, whole.mean(0), rtol=0, atol=10 * rounding)
    expected = whole.var(0, unbiased=False)
    torch.testing.assert_close(var, expected, rtol=1e-12, atol=100 * rounding)


def test_without_channels_there_is_nothing_to_merge():
    count, mean, var = merge(torch.tensor([[2.0], [3.0]], dtype=torch.float64))
    assert count == 5 and mean.shape == var.shape == (0,)
