"""Signs as bits and their majority, against numpy that unpacks everything."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import _core
from paceline.compress.kernels import Draw
from paceline.compress.sign_bits import (
    Momentum,
    majority,
    num_words,
    pack_corrected,
    pack_signs,
    pack_tracked,
    unpack_signs,
)
from paceline.errors import UsageError

SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 5e-324, 3e38]
LENGTHS = st.integers(0, 300) | st.sampled_from([8, 63, 64, 65, 128, 4099])
COINS = st.builds(
    Draw,
    st.integers(0, 2**63),
    st.integers(0, 2**40),
    st.integers(0, 2**45) | st.integers(0, 130),
)
DTYPES = st.sampled_from([torch.float32, torch.float64])


@pytest.fixture(params=[False, True], ids=["best kernels", "portable kernels"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    _core.use_portable_kernels(request.param)
    yield
    _core.use_portable_kernels(False)


def scatter(x: int) -> int:
    """splitmix64, as its authors print it."""
    whole = 2**64 - 1
    z = (x + 0x9E3779B97F4A7C15) & whole
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & whole
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & whole
    return z ^ z >> 31


def coin_of(coin: Draw, count: int) -> np.ndarray:
    """The coin's definition, one element after the other."""
    key, found = scatter((scatter(coin.seed) + coin.step // 2) % 2**64), []
    for index in range(coin.first, coin.first + count):
        word = scatter((key + (index // 64) * 0x9E3779B97F4A7C15) % 2**64)
        found.append((word >> index % 64 & 1) ^ (coin.step % 2))
    return np.array(found, dtype=bool)


def signs_of(values: torch.Tensor, coin: Draw) -> np.ndarray:
    """True for plus; by the coin where there is no sign."""
    array = values.numpy()
    return np.where((array != 0) & np.isfinite(array), array > 0, coin_of(coin, len(array)))


def read(bits: torch.Tensor) -> np.ndarray:
    return np.unpackbits(bits.numpy().view(np.uint8), bitorder="little").astype(bool)


def write(signs: np.ndarray) -> torch.Tensor:
    padded = np.zeros(num_words(len(signs)) * 64, dtype=bool)
    padded[: len(signs)] = signs
    return torch.from_numpy(np.packbits(padded, bitorder="little").view(np.int64).copy())


def draw(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    chance = np.random.default_rng(seed)
    values = np.where(
        chance.random(count) < 0.2, chance.choice(SPECIAL, count), chance.standard_normal(count)
    )
    return torch.from_numpy(values).to(dtype)


@given(st.integers(0, 10**6), LENGTHS, DTYPES, COINS)
def test_signs(seed: int, count: int, dtype: torch.dtype, coin: Draw) -> None:
    values, bits = draw(seed, count, dtype), torch.full((num_words(count),), 77)
    pack_signs(values, coin, bits)
    found = read(bits)
    assert (found[:count] == signs_of(values, coin)).all() and not found[count:].any()


def kept(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a worker may have kept: always finite."""
    return draw(seed, count, dtype).nan_to_num(0, 0, 0)


def track(values: torch.Tensor, last: torch.Tensor, keep: float) -> torch.Tensor:
    kept, taken = (torch.tensor(part, dtype=values.dtype) for part in (keep, 1 - keep))
    following = kept * last + taken * values.where(values.isfinite(), torch.zeros_like(values))
    following[following.abs() < torch.finfo(values.dtype).tiny] = 0
    return following


@given(st.integers(0, 10**6), LENGTHS, DTYPES, COINS, st.sampled_from([0.0, 0.5, 0.9, 0.999]))
def test_tracked_signs(seed: int, count: int, dtype: torch.dtype, coin: Draw, keep: float) -> None:
    values, last = draw(seed, count, dtype), kept(seed + 1, count, dtype)
    momentum, bits = Momentum(last.clone(), keep), torch.empty(num_words(count), dtype=torch.int64)
    pack_tracked(values, momentum, coin, bits)
    expected = track(values, last, keep)
    assert torch.equal(momentum.values, expected)
    assert (read(bits)[:count] == signs_of(expected, coin)).all()


@given(
    *(st.integers(0, 10**6), LENGTHS, DTYPES, COINS, st.sampled_from([0.0, 0.5, 1e-7])),
    st.sampled_from([None, 0.5, 0.9]),
)
def test_corrected_signs(
    seed: int, count: int, dtype: torch.dtype, coin: Draw, scale: float, keep: float | None
) -> None:
    values, last, moving = (
        make(seed + i, count, dtype) for i, make in enumerate((draw, kept, kept))
    )
    voted, bits = last.clone(), torch.empty(num_words(count), dtype=torch.int64)
    momentum = None if keep is None else Momentum(moving.clone(), keep)
    mean = pack_corrected(values, momentum, voted, scale, coin, bits)
    if momentum is not None:
        values = track(values, moving, momentum.keep)
        assert torch.equal(momentum.values, values)
    left_out = last - torch.tensor(scale, dtype=dtype) * last.sign()
    expected = values.where(values.isfinite(), torch.zeros_like(values)) + left_out
    expected[(expected.abs() < torch.finfo(dtype).tiny) | ~expected.isfinite()] = 0
    assert torch.equal(voted, expected)
    assert (read(bits)[:count] == signs_of(expected, coin)).all()
    sizes = expected[expected != 0].abs().double()
    assert mean == (pytest.approx(float(sizes.mean()), rel=1e-12) if len(sizes) else 0.0)


@given(st.integers(0, 10**6), st.integers(1, 300), st.integers(1, 9), COINS)
def test_the_majority(seed: int, count: int, workers: int, coin: Draw) -> None:
    rows = np.random.default_rng(seed).random((workers, count)) < 0.5
    bits = torch.empty(num_words(count), dtype=torch.int64)
    majority([write(row) for row in rows], coin, bits)
    votes = rows.sum(0)
    expected = np.where(2 * votes == workers, coin_of(coin, count), 2 * votes > workers)
    assert (read(bits)[:count] == expected).all()


@given(st.integers(0, 10**6), LENGTHS, st.sampled_from([1.0, 0.1, 3e-6]))
def test_signs_become_numbers(seed: int, count: int, scale: float) -> None:
    signs = np.random.default_rng(seed).random(count) < 0.5
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        values = torch.empty(count, dtype=dtype)
        unpack_signs(write(signs), scale, values)
        one = torch.tensor(scale, dtype=torch.float64).float().to(dtype)
        if dtype == torch.float64:
            one = torch.tensor(scale, dtype=dtype)
        assert torch.equal(values, torch.where(torch.from_numpy(signs), one, -one))


def test_what_is_larger_than_the_cache_of_a_core() -> None:
    count, coin = 1_000_003, Draw(3, 1)
    chance = torch.Generator().manual_seed(5)  # with which no two numbers cancel each other
    values, last = (torch.randn(count, generator=chance) for _ in range(2))
    momentum, bits = Momentum(last.clone(), 0.5), torch.empty(num_words(count), dtype=torch.int64)
    pack_tracked(values, momentum, coin, bits)
    following = momentum.values
    assert torch.equal(following, 0.5 * last + 0.5 * values) and bool(following.all())
    assert (read(bits)[:count] == (following > 0).numpy()).all()
    for offset in (0, 1):  # memory that is aligned, and memory that is not
        out = torch.empty(count + offset)[offset:]
        unpack_signs(bits, 0.25, out)
        assert torch.equal(out, torch.where(following > 0, 0.25, -0.25))


@given(st.integers(0, 10**6), st.integers(2, 2000), st.data())
def test_parts_of_a_coin_fit_together(seed: int, count: int, data: st.DataObject) -> None:
    cut, coin = data.draw(st.integers(1, count - 1)), Draw(seed, 3, 21)
    nothing = torch.zeros(count)
    whole = torch.empty(num_words(count), dtype=torch.int64)
    part = torch.empty(num_words(count - cut), dtype=torch.int64)
    pack_signs(nothing, coin, whole)
    pack_signs(nothing[cut:], coin.at(cut), part)
    assert (read(part)[: count - cut] == read(whole)[cut:count]).all()


def test_what_is_refused() -> None:
    values, bits, coin = torch.zeros(65), torch.zeros(2, dtype=torch.int64), Draw(0, 0)
    for call, words in (
        (lambda: pack_signs(values, coin, bits[:1]), "65 signs take 2 words, not 1"),
        (lambda: pack_signs(values.half(), coin, bits), "float32 or float64, not on float16"),
        (lambda: pack_signs(values.int(), coin, bits), "got torch.int32"),
        (lambda: pack_signs(values, coin, bits.int()), "bits: expected torch.int64"),
        (lambda: pack_signs(torch.zeros(65, 2)[:, 0], coin, bits), "contiguous"),
        (lambda: unpack_signs(bits, 1.0, values[:64]), "64 signs take 1 words, not 2"),
        (lambda: majority([bits, bits[:1]], coin, bits), "expected 2 elements, got 1"),
        (lambda: majority([], coin, bits), "no rows"),
        (
            lambda: pack_tracked(values, Momentum(values[:3], 0.5), coin, bits),
            "momentum: expected 65 elements, got 3",
        ),
        (
            lambda: pack_corrected(values, None, values.double(), 0.5, coin, bits),
            "voted: expected torch.float32",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            call()
