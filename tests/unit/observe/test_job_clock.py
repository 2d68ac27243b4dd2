"""The job's clock is found through a network that delays each direction as it likes."""

from __future__ import annotations

import random

import pytest

from paceline.observe.telemetry.clock import Ping, estimate


def _ping(rng: random.Random, at_s: float, offset_s: float) -> Ping:
    there_s, back_s = rng.expovariate(1 / 0.004), rng.expovariate(1 / 0.0001)  # one way is slow
    answered_s = at_s + there_s
    return Ping(at_s, answered_s + back_s, answered_s + offset_s)


@pytest.mark.parametrize("offset_s", [0.0, 1000.0, -86_400.5])
def test_the_quickest_answer_tells_and_knows_by_how_much_it_may_be_wrong(offset_s: float) -> None:
    rng = random.Random(7)
    for trial in range(200):
        pings = [_ping(rng, 10.0 * trial + n, offset_s) for n in range(8)]
        found = estimate(pings)
        assert found.error_s == min(ping.round_trip_s for ping in pings) / 2
        assert abs(found.offset_s - offset_s) <= found.error_s + 1e-9


def test_a_long_wait_in_one_answer_does_not_shift_the_clock() -> None:
    quick, slow = Ping(0.0, 0.001, 50.0005), Ping(1.0, 3.0, 51.0)
    assert estimate([slow, quick, slow]).offset_s == pytest.approx(50.0)
