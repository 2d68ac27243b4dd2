"""A sampler's order, kept: told once, and continued by another worker only if it gives the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from paceline.data.cursor.cursor import PEER
from paceline.data.split import order
from paceline.data.split.order import KeptOrder
from paceline.errors import UsageError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "CHUNK", 10)


def kept(sampler: Any) -> KeptOrder:
    """An order that is told to nobody else."""
    return KeptOrder(None, sampler, lambda attempt: attempt())


def handed_over(told: KeptOrder, sampler: Any) -> KeptOrder:
    other = kept(sampler)
    other.load(msgspec.msgpack.decode(msgspec.msgpack.encode(told.state())), PEER)
    return other


def shuffled(count: int, seed: int) -> list[Any]:
    units: list[Any] = [*range(count - 3), (1, "a"), [2, 3], "b"]
    random.Random(seed).shuffle(units)
    return units


def test_another_worker_goes_on_behind_what_was_told() -> None:
    units = shuffled(57, seed=1)
    first = kept(units)
    first.prepare(25)
    assert 25 <= first.told <= 30 and first.length is None
    assert first.units(3, 9) == units[3:9]
    second = handed_over(first, shuffled(57, seed=1))
    assert second.units(0, first.told) == units[: first.told]
    second.prepare(100)
    assert second.length == 57 and second.units(20, 57) == units[20:]
    assert second.units(50, 70) == units[50:]


def test_a_sampler_with_other_indices_is_refused() -> None:
    first = kept(shuffled(57, seed=1))
    first.prepare(25)
    for other in (shuffled(57, seed=2), shuffled(57, seed=1)[:20], []):
        with pytest.raises(UsageError, match=r"\(list\) gives other indices; seed it alike"):
            handed_over(first, other).prepare(40)
    handed_over(first, []).prepare(25)  # nothing more is needed of it


def test_what_has_counted_is_let_go() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    units = kept(endless())
    for step in range(50):
        units.prepare(4 * step + 4)
        assert units.units(4 * step, 4 * step + 4) == list(range(4 * step, 4 * step + 4))
        units.forget(4 * step)
    assert len(units.state()["kept"]) < 40
    again = handed_over(units, endless())
    again.prepare(250)
    assert again.units(240, 244) == [240, 241, 242, 243]


def test_what_a_sampler_raises_is_raised() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError):
        kept(broken()).prepare(5)


def test_units_that_were_not_told_yet_are_refused() -> None:
    units = kept(list(range(100)))
    units.prepare(5)
    with pytest.raises(UsageError, match="further ahead"):
        units.units(5, 15)
