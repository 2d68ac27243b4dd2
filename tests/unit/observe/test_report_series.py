"""Long lines in bounded memory: nothing that stands out is lost."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.observe.report.series import LINES, Curve, Rate, Series, TypicalStep
from paceline.observe.telemetry.step_times import StepTimes

points = st.lists(
    st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=200
)  # fmt: skip


@settings(deadline=None)
@given(points, st.integers(2, 20))
def test_bins_are_few_and_keep_count_sum_and_extremes(told: list, capacity: int) -> None:
    series = Series(1e-3, capacity=capacity)
    for x, y in told:
        series.add(x, y)
    bins = series.in_order()
    assert len(bins) <= capacity
    assert sum(one.count for one in bins) == len(told)
    assert sum(one.total for one in bins) == pytest.approx(sum(y for _, y in told), abs=1e-3)
    assert min(one.low for one in bins) == min(y for _, y in told)
    assert max(one.high for one in bins) == max(y for _, y in told)


def test_a_single_peak_among_a_million_values_is_drawn() -> None:
    series = Series(1.0)
    for step in range(100_000):
        series.add(float(step), 1.0 if step != 54_321 else 99.0)
    assert (54_321.0, 99.0) in series.points()
    assert 150 <= len(series.bins) <= 300


def test_a_late_start_does_not_cost_detail() -> None:
    curve = Curve(1e-3)
    for step in range(100):
        curve.add(0, 1e6 + step, float(step))
    assert len(curve.all.bins) >= 50


def test_the_mean_does_not_jump_between_workers_that_report_in_turn() -> None:
    curve = Curve(1e-3)
    for step in range(50):
        curve.add(step % 2, step * 0.1, 1.0 if step % 2 else 3.0)
    assert {y for _, y in curve.mean()} == {2.0}


def test_the_mean_goes_on_without_who_has_left_and_with_who_joins() -> None:
    curve = Curve(1e-3)
    for step in range(200):
        curve.add(0, float(step), 1.0)
        if step < 50:
            curve.add(1, float(step), 3.0)
        if step >= 120:
            curve.add(2, float(step), 5.0)
    mean = curve.mean()
    assert mean[0][1] == 2.0 and mean[-1][1] == 3.0
    assert {y for x, y in mean if 60 < x < 115} == {1.0}


def test_only_some_workers_have_a_line_of_their_own() -> None:
    curve = Curve(1e-3)
    for worker in range(512):
        curve.add(worker, 1.0, float(worker))
    assert len(curve.workers) == LINES and curve.is_crowded
    assert curve.mean() == [(pytest.approx(1.0), pytest.approx(255.5))]


def test_values_that_are_not_finite_are_counted() -> None:
    curve = Curve(1e-3)
    for x, y in ((1.0, 0.5), (2.0, None), (3.0, None)):
        curve.add(4, x, y)
    assert (curve.num_bad, curve.first_bad) == (2, (2.0, 4))
    assert math.isnan(curve.last[4])


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e3), st.floats(0, 1e6)), min_size=1))
def test_what_was_spread_is_all_there(told: list[tuple[float, float, float]]) -> None:
    rate = Rate(kinds=1, capacity=16)
    for begin, took, amount in told:
        rate.spread(begin, begin + took, (amount,))
    assert len(rate.bins) <= 16
    spread = sum(amounts[0] for amounts in rate.bins.values())
    before_s = rate.begin or 0.0  # what is before the first stretch counts as none
    whole = [(b, t, a) for b, t, a in told if b >= before_s]
    assert spread >= sum(a for _, _, a in whole) * (1 - 1e-6) - 1e-6
    assert spread <= sum(a for _, _, a in told) * (1 + 1e-6) + 1e-6


def test_a_steady_rate_is_flat() -> None:
    rate = Rate(kinds=1)
    for step in range(1000):
        rate.spread(7.0 + 0.1 * step, 7.1 + 0.1 * step, (32.0,))
    rates = [amounts[0] / (end - begin) for begin, end, amounts in rate.stretches()]
    assert rates == pytest.approx([320.0] * len(rates), rel=1e-6)


def test_the_typical_step_has_the_median_duration_and_all_workers() -> None:
    typical, rng = TypicalStep(), random.Random(0)
    steps = list(range(1, 5001))
    for step in steps:
        took_s = 9.0 if step == 1 else rng.uniform(1.0, 2.0)
        for worker in range(3):
            typical.add(worker, StepTimes(step, 10.0 * step, took_s, 0.1, 0.1))
    chosen = typical.choose()
    assert sorted(chosen) == [0, 1, 2] and len({one.step for one in chosen.values()}) == 1
    assert 1.3 < chosen[0].took_s < 1.7
    assert TypicalStep().choose() == {}
