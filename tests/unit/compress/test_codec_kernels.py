"""Blocks of fewer bits, against numpy that does the same one block after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import _core
from paceline.compress import blocks
from paceline.compress.kernels import Draw
from paceline.errors import UsageError

FORMATS = list(blocks.FORMATS)
BLOCKWISE = ["int8", "int4", "onebit"]  # one value that is not finite spoils its block
SPECIAL = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 1.2e-38, 3e38, -3.4e38, 65504.0, 7e4]
LENGTHS = st.integers(1, 300) | st.sampled_from([511, 512, 513, 2047, 2048, 2049, 5000])
SCALES = st.sampled_from([1.0, 1e-3, 1e-36, 1e-42, 1e30])
SEEDS = st.integers(0, 2**32)
TINY = float(np.finfo(np.float32).tiny)


@pytest.fixture(params=[False, True], ids=["best kernels", "portable kernels"], autouse=True)
def portable(request: pytest.FixtureRequest) -> Iterator[None]:
    _core.use_portable_kernels(request.param)
    yield
    _core.use_portable_kernels(False)


def numbers(seed: int, count: int, scale: float = 1.0, special: float = 0.0) -> torch.Tensor:
    chance = np.random.default_rng(seed)
    values = (chance.standard_normal(count) * scale).astype(np.float32)
    odd = chance.random(count) < special
    values[odd] = chance.choice(np.array(SPECIAL, dtype=np.float32), count)[odd]
    return torch.from_numpy(values)


def encoded(name: str, values: torch.Tensor, **options) -> torch.Tensor:
    payload = torch.full((blocks.payload_bytes(name, len(values)),), 0xAA, dtype=torch.uint8)
    blocks.encode(name, values, payload, **{"draw": Draw(1, 2), **options})
    return payload


def decoded(name: str, *rows: torch.Tensor, count: int, threads: int = 1) -> torch.Tensor:
    out = torch.full((count,), 123.0)
    blocks.mean(name, rows, out, threads=threads)
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same numbers, NaN where the other has it."""
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7), b.nan_to_num(7)))


def step_for(block: np.ndarray, levels: int) -> np.float32:
    if not np.isfinite(block).all():
        return np.float32(np.nan)
    step = np.abs(block).max() / np.float32(levels)
    return step if step >= TINY else np.float32(0)


def onebit_means(block: np.ndarray) -> tuple[float, float]:
    if not np.isfinite(block).all():
        return np.nan, np.nan
    exact = block.astype(np.float64)
    plus, minus = exact[block >= 0], exact[block < 0]
    return plus.mean() if len(plus) else 0.0, minus.mean() if len(minus) else 0.0


@given(name=st.sampled_from(["bf16", "fp16"]), seed=SEEDS, count=LENGTHS, scale=SCALES)
def test_sixteen_bits_are_those_of_torch(name, seed, count, scale):
    values = numbers(seed, count, scale, special=0.1)
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    payload = encoded(name, values)
    assert same(payload.view(dtype)[:count].float(), values.to(dtype).float())
    assert not payload[2 * count :].any()
    assert same(decoded(name, payload, count=count), values.to(dtype).float())


@given(seed=SEEDS, count=LENGTHS, scale=SCALES, special=st.sampled_from([0.0, 0.0, 0.002]))
def test_int8_is_the_nearest_of_255_levels(seed, count, scale, special):
    values = numbers(seed, count, scale, special)
    found = decoded("int8", encoded("int8", values), count=count).numpy()
    for at in range(0, count, 256):
        block = values.numpy()[at : at + 256]
        with np.errstate(over="ignore"):
            step = step_for(block, 127)
        if np.isfinite(step) and step > 0:
            level = np.rint(block * (np.float32(1) / step)).astype(np.float32)
            # The step of a block with the largest numbers there are is one bit less: 1e-7 off.
            assert np.allclose(found[at : at + 256], level * step, rtol=2e-7, atol=0)
            assert (np.abs(found[at : at + 256] - block) <= step * 0.50002).all()
        else:
            assert np.array_equal(found[at : at + 256], np.full_like(block, step), equal_nan=True)


@given(seed=SEEDS, count=LENGTHS, scale=SCALES, special=st.sampled_from([0.0, 0.0, 0.002]))
def test_int4_is_one_of_the_two_levels_around(seed, count, scale, special):
    values = numbers(seed, count, scale, special)
    found = decoded("int4", encoded("int4", values), count=count).numpy()
    for at in range(0, count, 512):
        block, got = values.numpy()[at : at + 512], found[at : at + 512]
        step = step_for(block, 7)
        if np.isfinite(step) and step > 0:
            level = np.float64(got) / np.float64(step)
            assert np.allclose(level, np.rint(level), atol=1e-5) and (np.abs(level) < 7.001).all()
            assert (np.abs(level - np.float64(block) / np.float64(step)) < 1.00001).all()
        else:
            assert np.array_equal(got, np.full_like(block, step), equal_nan=True)


@given(seed=SEEDS, count=LENGTHS, scale=SCALES, special=st.sampled_from([0.0, 0.0, 0.0005]))
def test_onebit_is_the_mean_of_its_side(seed, count, scale, special):
    values = numbers(seed, count, scale, special)
    payload = encoded("onebit", values)
    found = decoded("onebit", payload, count=count).numpy()
    for at in range(0, count, 2048):
        block = values.numpy()[at : at + 2048]
        plus, minus = onebit_means(block)
        # Floats are added in fours before they become doubles, and the mean is rounded once.
        expected = np.where(block < 0, minus, plus)
        assert np.allclose(found[at : at + 2048], expected, rtol=4e-7, atol=2e-45, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 0.1, 1e-45, -1e-40, 1e-36, 3.4e38])
@pytest.mark.parametrize("count", [1, 255, 3000])
def test_equal_values_come_back(name, value, count):
    values, residual = torch.full((count,), value), torch.zeros(count)
    found = decoded(name, encoded(name, values, residual=residual), count=count)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    if kind is not None:
        assert same(found, values.to(kind).float())
        return
    is_tiny = name != "onebit" and abs(value) / {"int8": 127, "int4": 7}[name] < TINY
    assert torch.allclose(found, torch.zeros(count) if is_tiny else values, rtol=3e-7, atol=0)
    assert torch.equal(found + residual, values)


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_block_and_no_residual(name, bad):
    size = blocks.FORMATS[name].values
    values, residual = numbers(1, 3 * size), numbers(2, 3 * size)
    values[size + 5] = bad
    before = residual.clone()
    found = decoded(name, encoded(name, values, residual=residual), count=3 * size).view(3, size)
    assert found[1].isnan().all() and found[0].isfinite().all() and found[2].isfinite().all()
    assert torch.equal(residual.view(3, size)[1], before.view(3, size)[1])
    assert not torch.equal(residual.view(3, size)[0], before.view(3, size)[0])


def test_sixteen_bits_keep_the_residual_where_they_overflow():
    values = torch.tensor([1.0, 1e6, -1e6, np.nan, 1.0001])
    residual = torch.tensor([0.0, 0.5, 0.5, 0.5, 0.0])
    found = decoded("fp16", encoded("fp16", values, residual=residual), count=5)
    assert found[1] == np.inf and found[2] == -np.inf and found[3].isnan()
    assert residual.tolist()[:4] == [0, 0.5, 0.5, 0.5] and 0 < residual[4] < 1e-3


@given(name=st.sampled_from(FORMATS), seed=SEEDS, count=LENGTHS, scale=SCALES)
def test_the_residual_is_what_was_lost(name, seed, count, scale):
    values, before = numbers(seed, count, scale, 0.001), numbers(seed + 1, count, scale / 8)
    residual = before.clone()
    found = decoded(name, encoded(name, values, residual=residual), count=count)
    v = values + before
    expected = torch.where(found.isfinite(), v - found, before)
    assert torch.equal(residual, expected)
    finite = found.isfinite()
    # The difference is rounded once: to half a unit in the last place of the largest of the three.
    unit = torch.maximum(torch.maximum(v.abs(), found.abs()), residual.abs()) * 2.0**-23
    assert ((found.double() + residual.double() - v.double()).abs() <= unit.clamp(min=1e-45))[
        finite
    ].all()


@given(name=st.sampled_from(FORMATS), seed=SEEDS, count=LENGTHS, num_rows=st.integers(1, 11))
def test_means_are_added_in_order_and_divided_once(name, seed, count, num_rows):
    rows = [
        encoded(name, numbers(seed + i, count, special=0.0005), draw=Draw(seed, i))
        for i in range(num_rows)
    ]
    total = decoded(name, rows[0], count=count)
    for row in rows[1:]:
        total = total + decoded(name, row, count=count)
    mean = decoded(name, *rows, count=count)
    assert same(mean, total / num_rows)

    before = numbers(seed + 99, count)
    residual, payload = before.clone(), torch.empty_like(rows[0])
    blocks.recode(name, rows, payload, residual=residual, draw=Draw(3, 4, 5))
    assert torch.equal(payload, encoded(name, mean, draw=Draw(3, 4, 5)))
    found = decoded(name, payload, count=count)
    lost = before + num_rows * (mean - found)
    assert same(residual, torch.where(found.isfinite(), lost, before))
    blocks.recode(name, rows, rows[-1], count=count, draw=Draw(3, 4, 5))
    assert torch.equal(payload, rows[-1])


def test_int4_has_the_right_mean():
    """Each of 512 values is rounded 4000 times, independently.

    The error of a mean has a standard deviation of at most step / 2 / sqrt(4000). One of 512 is
    beyond 6 of these with a probability of less than 512 * 2e-9 = 1e-6, were they drawn anew; the
    draws are fixed, so that the test fails always or never.
    """
    repeats, step = 4000, 1 / 7
    values = torch.linspace(-1, 1, 512)
    total = torch.zeros(512, dtype=torch.float64)
    for repeat in range(repeats):
        total += decoded("int4", encoded("int4", values, draw=Draw(11, repeat)), count=512)
    error = total / repeats - values
    assert error.abs().max() < 6 * step / 2 / repeats**0.5
    assert error.mean().abs() < 6 * step / 2 / (512 * repeats) ** 0.5


def test_int4_rounds_neighbours_and_steps_independently():
    """Of 2^16 pairs of coins half are equal; beyond 6 standard deviations with p < 2e-9."""
    count = 2**16 + 512
    values = torch.full((count,), 0.5 / 7)
    values[::512] = 1.0  # the largest of every block: the other values are between levels 0 and 1
    ups = torch.stack(
        [decoded("int4", encoded("int4", values, draw=Draw(5, i)), count=count) > 0 for i in (0, 1)]
    )
    among = torch.ones(count, dtype=torch.bool)
    among[::512] = False
    for distance in (1, 2, 8, 64, 256):
        pairs = among[distance:] & among[:-distance]
        equal = (ups[0, distance:] == ups[0, :-distance])[pairs]
        assert abs(equal.sum() - len(equal) / 2) < 6 * len(equal) ** 0.5 / 2
    equal = (ups[0] == ups[1])[among]
    assert abs(equal.sum() - len(equal) / 2) < 6 * len(equal) ** 0.5 / 2


@given(seed=SEEDS, first=st.integers(0, 2000) | st.integers(2**32 - 2000, 2**32 + 9))
def test_int4_draws_belong_to_elements(seed, first):
    values = numbers(seed, 2048)
    whole = encoded("int4", values, draw=Draw(seed, 7, first))
    parts = [
        encoded("int4", values[at : at + 1024], draw=Draw(seed, 7, first).at(at))
        for at in (0, 1024)
    ]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, encoded("int4", values, draw=Draw(seed, 8, first)))
    assert not torch.equal(whole, encoded("int4", values, draw=Draw(seed + 1, 7, first)))


@pytest.mark.parametrize("name", FORMATS)
def test_threads_change_nothing(name):
    count = 4 * 65536 + 777
    values, before = numbers(1, count, special=1e-4), numbers(2, count)
    results = []
    for threads in (1, 2, 3):
        residual, left = before.clone(), before.clone()
        payload = encoded(name, values, residual=residual, draw=Draw(1, 2, 3), threads=threads)
        rows = [payload, encoded(name, values, draw=Draw(4, 5), threads=threads)]
        mean = decoded(name, *rows, count=count, threads=threads)
        again = torch.empty_like(payload)
        blocks.recode(name, rows, again, residual=left, draw=Draw(6, 7), threads=threads)
        results.append((payload, residual, mean.view(torch.int32), again, left))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_nothing_is_nothing():
    for name in FORMATS:
        empty = torch.empty(0)
        assert len(encoded(name, empty, residual=empty.clone())) == 0
        assert len(decoded(name, encoded(name, empty), count=0)) == 0


def test_wrong_tensors_are_refused():
    values, payload = torch.zeros(300), torch.zeros(520, dtype=torch.uint8)
    with pytest.raises(
        UsageError, match=r"unknown block format 'int5'; choose one of bf16, fp16, int8"
    ):
        blocks.encode("int5", values, payload)
    with pytest.raises(UsageError, match=r"payload: expected 520 elements, got 519"):
        blocks.encode("int8", values, payload[:519])
    with pytest.raises(UsageError, match=r"values: expected torch.float32, got torch.float64"):
        blocks.encode("int8", values.double(), payload)
    with pytest.raises(UsageError, match=r"residual: expected 300 elements, got 299"):
        blocks.encode("int8", values, payload, residual=values[:299])
    with pytest.raises(UsageError, match=r"values: expected a contiguous CPU tensor"):
        blocks.encode("int8", torch.zeros(600)[::2], payload)
    with pytest.raises(UsageError, match=r"int4 rounds at random: pass `draw`"):
        blocks.encode("int4", values, payload[:260])
    with pytest.raises(UsageError, match=r"threads: expected at least 1, got 0"):
        blocks.encode("int8", values, payload, threads=0)
    with pytest.raises(UsageError, match=r"row 1: expected 520 elements"):
        blocks.mean("int8", [payload, payload[1:]], values)
    with pytest.raises(UsageError, match="no rows"):
        blocks.mean("int8", [], values)
    with pytest.raises(UsageError, match="pass `count`"):
        blocks.recode("int8", [payload], payload)
