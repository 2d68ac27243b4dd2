"""Races: found by vector clocks at the launch, whatever the schedule, with both Python stacks."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import laggard


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream("laggard")


@pytest.fixture(autouse=True)
def no_delay():
    """Without delays values are mostly right; the clocks must not need wrong ones."""
    with laggard.random_schedule(0, delay_us=0):
        yield


def test_a_missing_stream_wait_is_reported_with_both_lines(side):
    x = torch.ones(4, device="laggard")
    line = inspect.currentframe().f_lineno
    y = x * 3
    with side:
        y + 1
    [race] = laggard.take_races()
    assert race.earlier.startswith("aten::mul") and race.later.startswith("aten::add")
    lines = re.findall(rf"{re.escape(__file__)}:(\d+)", race.report)
    assert lines == [str(line + 3), str(line + 1)]


def test_a_wait_for_the_stream_or_an_event_is_enough(side):
    y = torch.ones(4, device="laggard") * 3
    side.wait_stream(current())
    with side:
        z = y + 1
    y.record_stream(side)
    event = torch.Event("laggard")
    event.record(side)
    current().wait_event(event)
    z.add_(1)
    assert z.tolist() == [5.0] * 4
    assert not laggard.take_races()


def test_a_wait_for_an_earlier_event_is_not_enough(side):
    event = torch.Event("laggard")
    event.record()
    y = torch.ones(4, device="laggard") * 3
    side.wait_event(event)
    with side:
        y + 1
    assert laggard.take_races()


def test_a_wait_of_the_host_orders_streams(side):
    y = torch.ones(4, device="laggard") * 3
    torch.accelerator.synchronize()
    with side:
        y + 1
    side.synchronize()
    assert not laggard.take_races()


def test_waits_are_transitive(side):
    third = torch.Stream("laggard")
    y = torch.ones(4, device="laggard")
    side.wait_stream(current())
    third.wait_stream(side)
    with third:
        y.add_(1)
    third.synchronize()
    assert not laggard.take_races()


def test_a_write_after_an_unfinished_read_is_a_race(side):
    y = torch.ones(4, device="laggard")
    side.wait_stream(current())
    with side:
        y + 1
    y.zero_()
    assert [race.later for race in laggard.take_races()] == ["aten::zero_"]


def test_two_reads_are_no_race(side):
    y = torch.ones(4, device="laggard")
    side.wait_stream(current())
    with side:
        z = y + 1
    w = y * 2
    side.synchronize()
    assert z.tolist() == w.tolist()
    assert not laggard.take_races()


def test_a_freed_block_that_another_stream_still_reads_is_a_race(side):
    x = torch.ones(1000, device="laggard")
    side.wait_stream(current())
    with side:
        z = x + 1
    del x
    assert not laggard.take_races()
    torch.empty(7, device="laggard")  # an allocator may cut the block for it
    assert [race.later for race in laggard.take_races()] == ["free"]
    side.synchronize()
    del z


def test_a_freed_block_may_be_used_again_after_a_wait(side):
    """As FSDP does: it frees memory of its own streams, which wait before they get more."""
    with side:
        x = torch.ones(1000, device="laggard")
    current().wait_stream(side)
    z = x + 1
    del x  # `current()` may still read it
    torch.empty(1000, device="laggard")  # is memory of another stream
    side.wait_stream(current())
    with side:
        torch.full((1000,), 7.0, device="laggard")
    side.synchronize()
    assert not laggard.take_races()
    assert z[0].item() == 2.0


def test_record_stream_keeps_a_freed_block(side):
    x = torch.ones(1000, device="laggard")
    side.wait_stream(current())
    with side:
        z = x + 1
    x.record_stream(side)
    del x
    torch.full((1000,), 7.0, device="laggard")
    side.synchronize()
    assert z[0].item() == 2.0
    assert not laggard.take_races()


@pytest.mark.parametrize("records", [True, False])
def test_a_prefetch_loop_needs_record_stream(side, records):
    # The lazy schedule alone gives the right values here.
    hosts = [torch.full((256,), float(i)).pin_memory() for i in range(4)]
    total = torch.zeros(256, device="laggard")
    for host in hosts:
        with side:
            batch = host.to("laggard", non_blocking=True)
        current().wait_stream(side)
        total.add_(batch)
        if records:
            batch.record_stream(current())
        del batch
    torch.accelerator.synchronize()
    assert bool(laggard.take_races()) is not records


def test_views_race_only_where_they_overlap(side):
    x = torch.zeros(8, 8, device="laggard")
    side.wait_stream(current())
    x[:, 0].add_(1)
    x[0, 4:].add_(1)
    with side:
        x[:, 1].add_(1)
        x[4:, 4:].add_(1)
        x[1::2, 2:4].add_(1)
    x[::2, 2:4].add_(1)
    assert not laggard.take_races()
    x.t()[1].add_(1)  # column 1
    assert len(laggard.take_races()) == 1


def test_a_race_can_be_raised_where_it_happens(side):
    y = torch.ones(4, device="laggard") * 3
    with laggard.race_mode("raise"), side, pytest.raises(RuntimeError, match="without waiting"):
        y + 1


def test_no_races_names_the_first(side):
    with pytest.raises(AssertionError, match="found 1 races"), laggard.no_races():
        y = torch.ones(4, device="laggard") * 3
        with side:
            y + 1
