"""int8 with shared scales: the workers' bytes add up to their mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import _core
from paceline.compress import blocks
from paceline.errors import UsageError


@pytest.fixture(params=[False, True], ids=["best kernels", "portable kernels"], autouse=True)
def portable(request):
    _core.use_portable_kernels(request.param)
    yield
    _core.use_portable_kernels(False)


def blocks_of(values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split(blocks.SHARED_VALUES))


def agree(values: list[torch.Tensor], residuals: list[torch.Tensor], threads: int) -> torch.Tensor:
    """The all-reduce with MAX, as the engine folds: NaN wins."""
    found = []
    for v, r in zip(values, residuals, strict=True):
        mine = torch.empty(blocks.num_shared_blocks(len(v)))
        blocks.block_absmax(v, r, mine, threads=threads)
        sums = [block.abs().max() for block in blocks_of(v + r)]
        expected = torch.stack([s if s.isfinite() else torch.tensor(np.nan) for s in sums])
        assert torch.equal(mine.isnan(), expected.isnan())
        assert torch.equal(mine.nan_to_num(-1), expected.nan_to_num(-1))
        found.append(mine)
    total = found[0]
    for other in found[1:]:
        total = torch.maximum(total, other)
    return total


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 600) | st.just(140_001),
    workers=st.sampled_from([1, 2, 3, 8, 127]),
    scale=st.sampled_from([1.0, 1e-30, 1e-38, 1e30]),
    threads=st.integers(1, 3),
)
def test_the_sum_of_bytes_decodes_to_the_mean(seed, count, workers, scale, threads):
    if count > 600:
        workers = min(workers, 3)
    chance, levels = torch.Generator().manual_seed(seed), blocks.levels_for(workers)
    values = [torch.randn(count, generator=chance) * scale for _ in range(workers)]
    residuals = [torch.randn(count, generator=chance) * scale / 8 for _ in range(workers)]
    absmax = agree(values, residuals, threads)
    total = torch.zeros(count, dtype=torch.int8)
    sent = torch.zeros(count, dtype=torch.float64)
    half_step = (absmax / levels / 2).repeat_interleave(blocks.SHARED_VALUES)[:count]
    if scale == 1e-38:
        half_step = half_step.clamp(min=float(absmax.max()))  # too small to be sent at all
    for v, residual in zip(values, residuals, strict=True):
        whole, part = v + residual, torch.empty(count, dtype=torch.int8)
        blocks.encode_shared(v, absmax, levels, part, residual=residual, threads=threads)
        assert part.abs().max() <= levels
        assert (residual.abs() <= half_step * 1.0001).all()
        sent += whole.double() - residual.double()
        total += part
    mean = torch.empty(count)
    blocks.decode_shared(total, absmax, levels, workers, mean, threads=threads)
    assert torch.allclose(mean.double(), sent / workers, rtol=1e-5, atol=float(absmax.max()) * 1e-5)


def test_a_value_above_what_was_agreed_on_is_cut_off_and_kept():
    values, absmax = torch.tensor([10.0, -10.0, 0.4]), torch.tensor([1.0])
    residual, part = torch.zeros(3), torch.empty(3, dtype=torch.int8)
    blocks.encode_shared(values, absmax, 63, part, residual=residual)
    assert part.tolist() == [63, -63, 25]
    assert torch.allclose(residual, torch.tensor([9.0, -9.0, 0.4 - 25 / 63]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_anywhere_is_nan_everywhere(bad):
    values = [torch.ones(600), torch.ones(600)]
    residuals = [torch.full((600,), 0.5), torch.full((600,), 0.5)]
    values[1][300] = bad
    absmax = agree(values, residuals, 1)
    assert absmax.isnan().tolist() == [False, True, False]
    total = torch.zeros(600, dtype=torch.int8)
    for v, residual in zip(values, residuals, strict=True):
        part = torch.empty(600, dtype=torch.int8)
        blocks.encode_shared(v, absmax, 63, part, residual=residual)
        assert (residual[256:512] == 0.5).all()
        total += part
    mean = torch.empty(600)
    blocks.decode_shared(total, absmax, 63, 2, mean)
    assert mean[256:512].isnan().all()
    assert torch.allclose(torch.cat([mean[:256], mean[512:]]), torch.tensor(1.5))


def test_sums_that_do_not_fit_a_byte_are_refused():
    with pytest.raises(UsageError, match="1 to 127 workers, not 128"):
        blocks.levels_for(128)
    part, absmax, out = torch.zeros(5, dtype=torch.int8), torch.ones(1), torch.empty(5)
    with pytest.raises(UsageError, match="3 workers with 63 levels"):
        blocks.decode_shared(part, absmax, 63, 3, out)
    with pytest.raises(UsageError, match="levels: expected 1 to 127, got 0"):
        blocks.encode_shared(out, absmax, 0, part)
    with pytest.raises(UsageError, match="absmax: expected 1 elements, got 2"):
        blocks.encode_shared(out, torch.ones(2), 63, part)


@pytest.mark.parametrize("count", [300_001, 300_032])
def test_means_that_go_past_the_cache(count):
    chance = torch.Generator().manual_seed(1)
    total = torch.randint(-127, 128, (count,), generator=chance).to(torch.int8)
    absmax = torch.rand(blocks.num_shared_blocks(count), generator=chance) + 0.1
    step = (absmax / 63 / 2).repeat_interleave(blocks.SHARED_VALUES)[:count]
    out = torch.empty(count + 1)
    for where in (out[:count], out[1:]):
        blocks.decode_shared(total, absmax, 63, 2, where)
        assert torch.equal(where, total.float() * step)
