"""The prediction of throughput with slow workers: closed forms, the rule itself, and the delays."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers.delays import Delays, one_slow, sometimes_slow
from servers.simulation import bound_of, simulate

PACES = ("ps", "ssp:3", "async")

# Whole numbers of quarters add up without rounding, so that times can be compared exactly.
_DELAY = st.integers(1, 20).map(lambda quarters: quarters / 4)
_EQUAL_NUMBERS = st.integers(1, 8).flatmap(
    lambda steps: st.lists(st.lists(_DELAY, min_size=steps, max_size=steps), min_size=1, max_size=4)
)


def read_times(delays: list[list[float]], bound: int) -> list[list[float]]:
    """Solve the rule as a recurrence: read k of a worker waits for everybody's push k - bound."""
    pushes: list[list[float]] = [[] for _ in delays]
    reads: list[list[float]] = [[0.0] for _ in delays]
    for k in range(len(delays[0])):
        for worker, own in enumerate(delays):
            pushes[worker].append(reads[worker][-1] + own[k])
        for worker in range(len(delays)):
            awaited = [other[k - bound] for other in pushes] if k >= bound else []
            reads[worker].append(max([pushes[worker][k], *awaited]))
    return reads


@given(_EQUAL_NUMBERS)
def test_each_synchronous_step_lasts_as_long_as_the_slowest(delays):
    forecast = simulate(delays, bound=0)
    assert forecast.steps == (len(delays[0]),) * len(delays)
    assert forecast.last_s == sum(max(step) for step in zip(*delays, strict=True))


@given(_EQUAL_NUMBERS, st.integers(1, 40))
def test_asynchronous_workers_are_each_on_their_own(delays, horizon_s):
    forecast = simulate(delays, None, horizon_s)
    ends = [[end for end in itertools.accumulate(own) if end <= horizon_s] for own in delays]
    assert forecast.steps == tuple(len(own) for own in ends)
    assert forecast.last_s == max((own[-1] for own in ends if own), default=0.0)


@given(_EQUAL_NUMBERS, st.integers(0, 4), st.integers(1, 40))
def test_a_bounded_worker_reads_when_the_recurrence_says(delays, bound, horizon_s):
    within = [[t for t in own[1:] if t <= horizon_s] for own in read_times(delays, bound)]
    forecast = simulate(delays, bound, horizon_s)
    assert forecast.steps == tuple(len(own) for own in within)
    assert forecast.last_s == max((own[-1] for own in within if own), default=0.0)


@given(_EQUAL_NUMBERS, st.integers(0, 4), st.integers(1, 40))
def test_workers_that_do_just_the_predicted_steps_come_to_their_end(delays, bound, horizon_s):
    forecast = simulate(delays, bound, horizon_s)
    exactly = [own[:count] for own, count in zip(delays, forecast.steps, strict=True)]
    assert simulate(exactly, bound) == forecast


@given(_EQUAL_NUMBERS, st.integers(0, 4), st.integers(1, 40))
def test_a_wider_bound_never_makes_a_worker_slower(delays, bound, horizon_s):
    narrow, wide = (simulate(delays, s, horizon_s).steps for s in (bound, bound + 1))
    assert all(few <= many for few, many in zip(narrow, wide, strict=True))


def test_one_steadily_slow_worker_holds_up_all_but_the_asynchronous_ones():
    delays = one_slow(4, base_s=1.0, slow_factor=4.0).until(1000.0)
    rates = {pace: simulate(delays, bound_of(pace), 1000.0).steps_per_s for pace in PACES}
    assert rates["ps"] == 1.0  # four workers, a step in four seconds
    assert rates["async"] == 3.25  # three steps a second, and a quarter of one
    assert rates["ps"] < rates["ssp:3"] < 1.02  # the lead of three steps is soon used up


def test_steps_that_are_slow_by_chance_cost_what_probability_says():
    delays = sometimes_slow(4, base_s=1.0, chance=0.1, slow_factor=4.0, seed=7)
    horizon_s = 20_000.0
    rates = {pace: simulate(delays.until(horizon_s), bound_of(pace), horizon_s) for pace in PACES}
    # In a synchronous step somebody is slow with probability 1 - 0.9 ** 4.
    expected_s = 1 + 3 * (1 - 0.9**4)
    assert rates["ps"].steps_per_s == pytest.approx(4 / expected_s, rel=0.02)
    assert rates["async"].steps_per_s == pytest.approx(4 / 1.3, rel=0.02)
    assert rates["ps"].steps_per_s < rates["ssp:3"].steps_per_s < rates["async"].steps_per_s


def test_bounds_are_read_from_the_names_of_paces():
    assert [bound_of(pace) for pace in (*PACES, "ssp:12")] == [0, 3, None, 12]
    with pytest.raises(ValueError):
        bound_of("allreduce")


def test_nothing_ends_before_the_shortest_delay():
    forecast = simulate([[1.0], [2.0]], None, horizon_s=0.5)
    assert forecast.steps == (0, 0) and forecast.steps_per_s == 0.0


def test_delays_are_the_same_whoever_draws_them_and_however_many():
    delays = sometimes_slow(3, base_s=0.5, chance=0.3, slow_factor=4.0, seed=11)
    again = Delays.from_request(delays.as_request())
    assert again == delays
    assert again.of(1, 5) == delays.of(1, 50)[:5]
    assert delays.of(0, 50) != delays.of(1, 50)  # each worker has bad luck of its own
    assert set(delays.of(2, 200)) == {0.5, 2.0}


def test_delays_until_a_horizon_reach_beyond_it():
    delays = one_slow(2, base_s=0.1, slow_factor=4.0)
    assert all(math.fsum(own) > 3.0 for own in delays.until(3.0))
