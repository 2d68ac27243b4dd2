"""The engine's kernels on plain memory: the mean of several tensors, and stochastic rounding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline import _core
from paceline.errors import UsageError

CODES = {
    dtype: _core.DTYPES.index(str(dtype).split(".")[1])
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32)
}
SMALL = (torch.float16, torch.bfloat16)


@pytest.fixture(params=[False, True], ids=["best kernels", "portable kernels"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    _core.use_portable_kernels(request.param)
    yield
    _core.use_portable_kernels(False)


def mean(tensors: list[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty_like(tensors[0]) if out is None else out
    _core.reduce_mean(
        [t.data_ptr() for t in tensors], out.data_ptr(), out.numel(), CODES[out.dtype]
    )
    return out


def rounded(
    values: torch.Tensor, dtype: torch.dtype, seed: int = 1, first: int = 0
) -> torch.Tensor:
    out = torch.full(values.shape, 77, dtype=dtype)
    place = (values.data_ptr(), out.data_ptr(), values.numel())
    _core.round_stochastic(*place, CODES[dtype], seed, first)
    return out


def neighbours(dtype: torch.dtype) -> torch.Tensor:
    """Return all finite numbers of a small dtype that are not negative, in order."""
    infinity = torch.tensor(float("inf"), dtype=dtype).view(torch.int16)
    return torch.arange(int(infinity), dtype=torch.int16).view(dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 17, 5001])
def test_the_mean_folds_in_order_and_divides_once(dtype: torch.dtype, count: int) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for n in (1, 2, 3, 5):
        tensors = [(torch.randn(count) * 10.0 ** (i - 2)).to(dtype) for i in range(n)]
        total = tensors[0].to(wide)
        for tensor in tensors[1:]:
            total = total + tensor.to(wide)
        expected = (total / n).to(dtype)
        assert torch.equal(mean(tensors), expected), n
        assert torch.equal(mean(tensors, tensors[-1]), expected), "in place"


def test_a_mean_that_is_larger_than_the_cache() -> None:
    tensors = [torch.randn(9_000_001) for _ in range(3)]
    assert torch.equal(mean(tensors), (tensors[0] + tensors[1] + tensors[2]) / 3)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", SMALL)
def test_what_the_target_can_hold_stays_as_it_is(dtype: torch.dtype) -> None:
    finite = neighbours(dtype)
    special = torch.tensor([float("inf"), 0.0], dtype=dtype)
    exact = torch.cat([finite, special, -finite, -special])
    for seed in range(3):
        result = rounded(exact.float(), dtype, seed)
        assert torch.equal(result.view(torch.int16), exact.view(torch.int16))
    nan = torch.tensor([float("nan"), -float("nan")])
    assert bool(rounded(nan, dtype).isnan().all())


@pytest.mark.parametrize("dtype", SMALL)
def test_the_result_is_one_of_the_two_neighbours(dtype: torch.dtype) -> None:
    finite = neighbours(dtype).double()
    values = (finite[:-1] + (finite[1:] - finite[:-1]) * torch.rand(len(finite) - 1)).float()
    found = rounded(values, dtype).double()
    assert bool(((found == finite[:-1]) | (found == finite[1:])).all())
    assert 0.4 < (found == finite[1:]).double().mean() < 0.6
    assert torch.equal(rounded(-values, dtype).double(), -found)


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("scale", [1.0, -3e4, 3e-5, 2.0**-23, 1e-7])
def test_the_mean_of_many_roundings_is_the_value(dtype: torch.dtype, scale: float) -> None:
    count = 1 << 20
    for fraction in (0.001, 0.3, 0.5, 0.9):
        finite = neighbours(dtype).double()
        at = int(torch.searchsorted(finite, abs(scale)))
        low, high = finite[at - 1], finite[at]
        value = (low + fraction * (high - low)).float()
        exact = float((value.double() - low) / (high - low))  # what is left of it in float32
        sign = 1.0 if scale > 0 else -1.0
        found = rounded(torch.full((count,), float(value) * sign), dtype, seed=5).double()
        share = float((found.abs() == high).double().mean())
        deviation = (exact * (1 - exact) / count) ** 0.5
        assert abs(share - exact) < 5 * deviation + 1e-12, (fraction, share, exact)


@pytest.mark.parametrize("dtype", SMALL)
def test_infinity_only_where_rounding_to_nearest_gives_it(dtype: torch.dtype) -> None:
    below, largest = neighbours(dtype)[-2:].double()
    values = (largest + (largest - below) * torch.linspace(0, 2, 4001).double()).float()
    values = torch.cat([values, torch.tensor([torch.finfo(torch.float32).max])])
    for sign in (1, -1):
        nearest, found = (sign * values).to(dtype), rounded(sign * values, dtype)
        assert torch.equal(found.isinf(), nearest.isinf())
        assert torch.equal(found[nearest.isinf()], nearest[nearest.isinf()])
    assert 0 < int(values.to(dtype).isinf().sum()) < len(values)


@pytest.mark.parametrize("dtype", SMALL)
def test_the_same_bits_for_the_same_seed_whatever_the_kernels_and_blocks(dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (100_003,), dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    whole = rounded(values, dtype, 9).view(torch.int16)
    _core.use_portable_kernels(True)
    assert torch.equal(rounded(values, dtype, 9).view(torch.int16), whole)
    _core.use_portable_kernels(False)
    starts = [0, 1, 8, 4099, 50_000]
    parts = [
        rounded(values[start:stop], dtype, 9, start).view(torch.int16)
        for start, stop in zip(starts, [*starts[1:], len(values)], strict=True)
    ]
    assert torch.equal(torch.cat(parts), whole)
    finite = torch.randn(100_000)
    assert not torch.equal(rounded(finite, dtype, 9), rounded(finite, dtype, 10))


def test_indices_beyond_32_bits_have_random_bits_of_their_own() -> None:
    values, border = torch.rand(1000), 1 << 32
    across = rounded(values, torch.bfloat16, 3, border - 500)
    assert torch.equal(across[500:], rounded(values[500:], torch.bfloat16, 3, border))
    assert not torch.equal(across[500:], rounded(values[500:], torch.bfloat16, 3, 0))


def test_what_the_kernels_refuse() -> None:
    number = torch.zeros(4)
    with pytest.raises(UsageError, match="no inputs"):
        _core.reduce_mean([], number.data_ptr(), 4, CODES[torch.float32])
    with pytest.raises(UsageError, match="not on int32"):
        _core.reduce_mean([number.data_ptr()], number.data_ptr(), 4, CODES[torch.int32])
    with pytest.raises(UsageError, match="not to float32"):
        place = (number.data_ptr(), number.data_ptr(), 4)
        _core.round_stochastic(*place, CODES[torch.float32], 1)
