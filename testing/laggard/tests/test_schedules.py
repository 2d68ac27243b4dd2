"""Wrong values: what the random and the lazy schedule make of a missing wait."""

from __future__ import annotations

import math

import pytest
import torch

import laggard

RIGHT = [4.0] * 4


def add_on_a_side_stream(*, wait: bool) -> list[float]:
    x = torch.ones(4, device="laggard")
    torch.accelerator.synchronize()
    y = x * 3
    side = torch.Stream("laggard")
    if wait:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        z = y + 1
    side.synchronize()
    values = z.tolist()
    torch.accelerator.synchronize()
    return values


def add_on_a_side_stream_by_event(*, record: bool) -> list[float]:
    y = torch.ones(4, device="laggard") * 3
    event = torch.Event("laggard")
    if record:
        event.record()
    side = torch.Stream("laggard")
    side.wait_event(event)
    with side:
        z = y + 1
    side.synchronize()
    values = z.tolist()
    torch.accelerator.synchronize()
    return values


def test_lazy_shows_a_missing_stream_wait_each_time():
    with laggard.lazy_schedule():
        for _ in range(5):
            assert all(map(math.isnan, add_on_a_side_stream(wait=False)))
            assert add_on_a_side_stream(wait=True) == RIGHT


def test_lazy_shows_a_missing_event_record():
    with laggard.lazy_schedule():
        assert add_on_a_side_stream_by_event(record=False) != RIGHT  # NaN, or what was there
        assert add_on_a_side_stream_by_event(record=True) == RIGHT


def test_random_shows_a_missing_stream_wait_for_some_seeds():
    wrong = 0
    for seed in range(30):
        with laggard.random_schedule(seed, delay_us=1000):
            wrong += add_on_a_side_stream(wait=False) != RIGHT
            assert add_on_a_side_stream(wait=True) == RIGHT
    assert wrong > 0


@pytest.mark.parametrize("schedule", [laggard.lazy_schedule, lambda: laggard.random_schedule(1)])
def test_an_event_means_its_last_record(schedule):
    with schedule():
        event, side = torch.Event("laggard"), torch.Stream("laggard")
        x = torch.zeros(4, device="laggard")
        for _ in range(3):
            x.add_(1)
            event.record()
        side.wait_event(event)
        with side:
            y = x * 2
        side.synchronize()
        assert y.tolist() == [6.0] * 4
        assert event.query()


def test_a_lazy_stream_does_not_run_what_is_not_waited_for():
    with laggard.lazy_schedule():
        event = torch.Event("laggard")
        torch.ones(4, device="laggard").mul_(2)
        event.record()
        side = torch.Stream("laggard")
        side.synchronize()  # another stream
        assert not event.query()  # the query itself is a demand
        event.synchronize()
        assert event.query()


def test_events_measure_time():
    begin, end = (torch.Event("laggard", enable_timing=True) for _ in range(2))
    with laggard.random_schedule(1, delay_us=4000):
        begin.record()
        torch.ones(4, device="laggard")
        end.record()
        end.synchronize()
    assert begin.elapsed_time(end) >= 1.0  # a quarter of the delay is certain
