"""The harness itself: a rank with a bug on the device fails, and its output names the bug."""

from __future__ import annotations

import signal

import pytest
import torch

from support.devices import device_outcomes, run_alone_on_device, run_on_device
from support.ranks import RanksFailed


def add_on_a_side_stream(wait: bool) -> list[float]:
    x = torch.ones(4, device="laggard") * 3
    side = torch.Stream("laggard")
    if wait:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
        x.record_stream(side)
    side.synchronize()
    return y.tolist()


def test_a_rank_uses_the_device_and_the_job(schedule):
    def body(world, number):
        value = torch.full((3,), float(world.rank + number), device="laggard").cpu()
        world.all_reduce(value)
        return value.tolist(), add_on_a_side_stream(True)

    assert run_on_device(2, body, 5, schedule=schedule) == [([11.0] * 3, [4.0] * 4)] * 2


def test_a_missing_wait_fails_the_rank_with_both_lines(schedule):
    with pytest.raises(RanksFailed, match="without waiting for it") as failed:
        run_alone_on_device(add_on_a_side_stream, False, schedule=schedule)
    report = str(failed.value)
    assert report.count(f"{__file__}:") >= 2 and "add_on_a_side_stream" in report


def test_an_early_read_of_pinned_memory_ends_the_rank(schedule):
    def body(world):
        buffer = torch.empty(4, pin_memory=True)
        buffer.copy_(torch.ones(4, device="laggard"), non_blocking=True)
        return buffer.tolist()

    [outcome] = device_outcomes(1, body, schedule=schedule)
    assert outcome.status == -signal.SIGSEGV
    assert "touched pinned memory while a copy of it was in flight" in outcome.output
