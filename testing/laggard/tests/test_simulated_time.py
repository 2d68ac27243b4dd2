"""Simulated time: it follows from sizes and waits, and not from the speed of this machine."""

from __future__ import annotations

import threading

import pytest
import torch

import laggard

MODEL = dict(copy_gb_s=1, copy_us=0, kernel_us=1000, memory_gb_s=1e9, launch_us=0, host_speed=0)
FLOATS = 250_000  # one millisecond of copying at 1 GB/s


def test_the_time_of_a_copy_follows_from_its_size():
    begin, end = (torch.Event("laggard", enable_timing=True) for _ in range(2))
    host = torch.ones(3 * FLOATS).pin_memory()
    with laggard.simulated_time(**MODEL):
        begin.record()
        host.to("laggard", non_blocking=True)
        end.record()
        end.synchronize()
        assert begin.elapsed_time(end) == pytest.approx(3.0)


def test_a_matrix_product_costs_its_operations():
    x = torch.ones(200, 100, device="laggard")
    with laggard.simulated_time(**{**MODEL, "kernel_us": 0, "tera_flops": 1e-3}):
        x @ x.t()
        torch.accelerator.synchronize()
        [span] = laggard.take_timeline()
    assert span.op.startswith("aten::mm")
    assert span.end_ms - span.begin_ms == pytest.approx(2 * 200 * 200 * 100 / 1e9 * 1e3)


def overlapped(wait_first: bool) -> float:
    """Return the end of three kernels and a copy of two milliseconds on a side stream."""
    x = torch.ones(8, device="laggard")
    large, target = torch.ones(2 * FLOATS, device="laggard"), torch.empty(2 * FLOATS).pin_memory()
    side, done = torch.Stream("laggard"), torch.Event("laggard", enable_timing=True)
    torch.accelerator.synchronize()
    with laggard.simulated_time(**MODEL):
        start = torch.Event("laggard", enable_timing=True)
        start.record()
        if wait_first:
            x.add_(1)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            target.copy_(large, non_blocking=True)
        for _ in range(2 if wait_first else 3):
            x.add_(1)
        torch.accelerator.current_stream().wait_stream(side)
        done.record()
        done.synchronize()
        return start.elapsed_time(done)


def test_work_of_two_streams_overlaps_as_far_as_waits_allow():
    assert overlapped(wait_first=False) == pytest.approx(3.0)  # the copy is hidden
    assert overlapped(wait_first=True) == pytest.approx(3.0)  # 1 + max(2, 2)


def test_a_host_that_waits_launches_later():
    x = torch.ones(8, device="laggard")
    with laggard.simulated_time(**MODEL):
        x.add_(1)
        assert laggard.host_clock_ms() == 0
        torch.accelerator.synchronize()
        assert laggard.host_clock_ms() == pytest.approx(1.0)
        laggard.spend_host_time(4)
        x.add_(1)
        spans = laggard.take_timeline()
        torch.accelerator.synchronize()
        spans += laggard.take_timeline()
    assert [(span.begin_ms, span.end_ms) for span in spans] == [
        (0.0, pytest.approx(1.0)),
        (pytest.approx(5.0), pytest.approx(6.0)),
    ]


def test_a_thread_that_waits_does_not_delay_the_others():
    x, y = torch.ones(8, device="laggard"), torch.ones(8, device="laggard")
    first, times = torch.Event("laggard"), []
    with laggard.simulated_time(**MODEL):
        x.add_(1)
        first.record()

        def wait() -> None:
            first.synchronize()
            times.append(laggard.host_clock_ms())

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        times.append(laggard.host_clock_ms())
        side = torch.Stream("laggard")
        with side:
            y.add_(1)
        side.synchronize()
        [span] = [span for span in laggard.take_timeline() if span.stream]
    assert times == [pytest.approx(1.0), 0]
    assert span.begin_ms == 0


def test_an_event_is_complete_when_its_time_has_come():
    x, event = torch.ones(8, device="laggard"), torch.Event("laggard")
    with laggard.simulated_time(**MODEL):
        x.add_(1)
        event.record()
        assert not event.query()
        laggard.spend_host_time(0.9)
        assert not event.query()
        laggard.spend_host_time(0.2)
        assert event.query()


def test_a_loop_of_queries_comes_to_an_end():
    x, event = torch.ones(8, device="laggard"), torch.Event("laggard")
    with laggard.simulated_time(**{**MODEL, "launch_us": 5}):
        x.add_(1)
        event.record()
        asked = 1
        while not event.query():
            asked += 1
    assert 190 <= asked <= 210  # 1 ms in steps of 5 microseconds


def test_work_of_the_host_counts_by_its_processor_time():
    with laggard.simulated_time(**{**MODEL, "host_speed": 1}):
        before = laggard.host_clock_ms()
        sum(range(200_000))
        assert laggard.host_clock_ms() - before > 0.5
        before = laggard.host_clock_ms()
        threading.Event().wait(0.05)
        assert laggard.host_clock_ms() - before < 5  # a thread that sleeps loses no time


def test_the_time_inside_of_the_device_is_known_for_each_thread():
    x, me = torch.ones(8, device="laggard"), threading.get_ident()
    with laggard.simulated_time(**{**MODEL, "host_speed": 1}):
        before_ms, launched = laggard.host_use(me)
        for _ in range(50):
            x.add_(1)
        inside_ms, launches = laggard.host_use(me)
    assert launches - launched == 50
    assert 0 < inside_ms - before_ms < 50
    assert laggard.host_use(1) == (0, 0)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="no option copies"), laggard.simulated_time(copies=1):
        pass
