"""The simulated world behaves like the real one where it matters, and the same every time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from simulation.network import End, Network
from simulation.process import Process
from simulation.world import World


class Listener(Process):
    """Keeps whatever comes; the caller's end is at `end`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: list[Any] = []
        self.endings: list[str] = []
        self.end: End | None = None

    def on_open(self, end: End) -> None:
        self.end = end

    def on_message(self, end: End, message: Any) -> None:
        self.heard.append(message)

    def on_end(self, end: End, why: str) -> None:
        self.endings.append(why)


class Pair:
    """Two processes on two hosts with a connection, at second 1."""

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.here, self.there = (Listener(self.world, self.network, n, n) for n in ("a", "b"))
        self.here.start()
        self.there.start()
        self.network.connect(self.here, "b", "talk")
        self.run(1.0)

    def run(self, seconds: float) -> None:
        self.world.run(self.world.now_s + seconds)

    def send(self, *messages: Any) -> None:
        assert self.here.end is not None
        for message in messages:
            self.here.end.send(message)


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield Pair()


def test_messages_arrive_in_order(pair: Pair) -> None:
    pair.send(*range(200))
    pair.run(1.0)
    assert pair.there.heard == list(range(200))


def test_one_seed_one_story() -> None:
    def times(seed: int) -> list[float]:
        pair = Pair(seed)
        pair.world.watchers.append(lambda: seen.append(pair.world.now_s))
        seen: list[float] = []
        pair.send(*range(20))
        pair.run(1.0)
        return seen

    assert times(7) == times(7) != times(8)


def test_nobody_listens(pair: Pair) -> None:
    pair.there.crash()
    pair.run(1.0)
    pair.network.connect(pair.here, "b", "again")
    pair.run(1.0)
    assert pair.here.endings == ["reset", "refused"]


@pytest.mark.parametrize("seed", range(10))
def test_a_crash_loses_a_tail_of_what_was_sent(seed: int) -> None:
    pair = Pair(seed)
    pair.send(*range(50))
    pair.run(0.0008)
    pair.here.crash()
    pair.run(1.0)
    assert pair.there.heard == list(range(len(pair.there.heard)))
    assert pair.there.endings == ["reset"]


def test_a_broken_connection_loses_what_is_under_way(pair: Pair) -> None:
    pair.send(1)
    pair.run(1.0)
    pair.send(2)
    assert pair.here.end is not None
    pair.network.drop(pair.here.end)
    pair.send(3)  # it does not know yet
    pair.run(1.0)
    assert pair.there.heard == [1]
    assert pair.here.endings == pair.there.endings == ["reset"]


def test_a_cut_that_heals_in_time_only_delays(pair: Pair) -> None:
    pair.network.cut("a", "b")
    pair.send(1, 2)
    pair.run(2.0)
    assert pair.there.heard == []
    pair.network.heal("a", "b")
    pair.run(1.0)
    assert pair.there.heard == [1, 2]
    assert pair.here.endings == []


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
def test_a_sender_notices_a_long_cut_of_either_direction(source: str, target: str) -> None:
    pair = Pair()
    pair.network.cut(source, target)
    pair.send(1)
    pair.run(5.0)
    assert pair.here.endings == ["vanished"]
    assert pair.there.heard == ([1] if source == "b" else [])


def test_the_other_end_is_half_open_until_it_sends(pair: Pair) -> None:
    pair.network.cut("a", "b")
    pair.send(1)
    pair.run(5.0)
    pair.network.heal("a", "b")
    pair.run(5.0)
    assert pair.there.endings == []
    assert pair.there.end is not None
    pair.there.end.send("anybody there?")
    pair.run(1.0)
    assert pair.there.endings == ["reset"]


def test_a_stopped_process_finds_everything_when_it_continues(pair: Pair) -> None:
    pair.there.pause()
    pair.send(1, 2)
    pair.run(5.0)
    assert pair.there.heard == []
    pair.here.crash()
    pair.there.resume()
    pair.run(1.0)
    assert (pair.there.heard, pair.there.endings) == ([1, 2], ["reset"])


def test_a_slow_process_does_things_late_and_in_order(pair: Pair) -> None:
    pair.there.lag_s = 0.1
    pair.send(*range(10))
    pair.run(0.55)
    assert pair.there.heard == list(range(5))
    pair.there.lag_s = 0.0
    pair.send(10)
    pair.run(1.0)
    assert pair.there.heard == list(range(11))


def test_a_new_life_does_not_hear_what_was_for_the_old(pair: Pair) -> None:
    pair.send(1)
    pair.there.crash()
    pair.there.start()
    pair.run(1.0)
    assert pair.there.heard == []
    assert pair.here.endings == ["reset"]
