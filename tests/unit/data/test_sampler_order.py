"""The order of a custom sampler, which another worker continues only if its own is the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from paceline.data.cursor.cursor import PEER
from paceline.data.split import order
from paceline.data.split.order import SamplerOrder
from paceline.errors import UsageError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "CHUNK", 10)


def order_of(sampler: Any) -> SamplerOrder:
    """Return an order that is not broadcast."""
    return SamplerOrder(None, sampler, lambda attempt: attempt())


def transferred(source: SamplerOrder, sampler: Any) -> SamplerOrder:
    other = order_of(sampler)
    other.load(msgspec.msgpack.decode(msgspec.msgpack.encode(source.state())), PEER)
    return other


def shuffled(count: int, seed: int) -> list[Any]:
    units: list[Any] = [*range(count - 3), (1, "a"), [2, 3], "b"]
    random.Random(seed).shuffle(units)
    return units


def test_another_worker_continues_after_the_known_indices() -> None:
    units = shuffled(57, seed=1)
    first = order_of(units)
    first.prepare(25)
    assert 25 <= first.num_received <= 30 and first.length is None
    assert first.units(3, 9) == units[3:9]
    second = transferred(first, shuffled(57, seed=1))
    assert second.units(0, first.num_received) == units[: first.num_received]
    second.prepare(100)
    assert second.length == 57 and second.units(20, 57) == units[20:]
    assert second.units(50, 70) == units[50:]


def test_a_sampler_with_other_indices_is_refused() -> None:
    first = order_of(shuffled(57, seed=1))
    first.prepare(25)
    for other in (shuffled(57, seed=2), shuffled(57, seed=1)[:20], []):
        with pytest.raises(UsageError, match=r"\(list\) gives other indices; seed it identically"):
            transferred(first, other).prepare(40)
    transferred(first, []).prepare(25)  # no further unit is needed


def test_committed_units_are_dropped() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    units = order_of(endless())
    for step in range(50):
        units.prepare(4 * step + 4)
        assert units.units(4 * step, 4 * step + 4) == list(range(4 * step, 4 * step + 4))
        units.forget(4 * step)
    assert len(units.state()["kept"]) < 40
    again = transferred(units, endless())
    again.prepare(250)
    assert again.units(240, 244) == [240, 241, 242, 243]


def test_what_a_sampler_raises_is_raised() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError):
        order_of(broken()).prepare(5)


def test_units_that_were_not_received_yet_are_refused() -> None:
    units = order_of(list(range(100)))
    units.prepare(5)
    with pytest.raises(UsageError, match="further ahead"):
        units.units(5, 15)
