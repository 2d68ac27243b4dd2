"""Memory: what correct programs may do with pinned memory, and how blocks are reused."""

from __future__ import annotations

import math
import mmap

import pytest
import torch

import laggard


def test_a_freed_block_is_reused_at_once_and_poisoned(laggard_device):
    x = torch.ones(300, device=laggard_device)
    address = x.data_ptr()
    del x
    y = torch.empty(300, device=laggard_device)
    assert y.data_ptr() == address
    assert all(map(math.isnan, y.tolist()))


def test_a_block_with_recorded_streams_is_not_reused_before_they_are_done():
    with laggard.lazy_schedule():
        side = torch.Stream("laggard")
        x = torch.ones(300, device="laggard")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x + 1
        x.record_stream(side)
        address = x.data_ptr()
        del x
        early = torch.empty(300, device="laggard")
        assert early.data_ptr() != address
        torch.accelerator.synchronize()
        late = torch.empty(300, device="laggard")
        assert late.data_ptr() == address


def test_memory_figures(laggard_device):
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1000, dtype=torch.uint8, device=laggard_device)
    assert torch.accelerator.memory_allocated() - before == 1024
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() >= before + 1024


def test_too_large_an_allocation_is_an_out_of_memory_error():
    with pytest.raises(torch.OutOfMemoryError, match="laggard:0 is out of memory"):
        torch.empty(2**34, dtype=torch.uint8, device="laggard")


@pytest.mark.parametrize("wait", ["event", "query", "stream", "device"])
def test_pinned_memory_opens_after_a_wait(laggard_device, wait):
    buffer, event = torch.empty(5000, pin_memory=True), torch.Event(laggard_device)
    source = torch.arange(5000.0, device=laggard_device)
    buffer.copy_(source, non_blocking=True)
    event.record()
    if wait == "event":
        event.synchronize()
    elif wait == "query":
        while not event.query():
            pass
    elif wait == "stream":
        torch.accelerator.current_stream().synchronize()
    else:
        torch.accelerator.synchronize()
    assert torch.equal(buffer, torch.arange(5000.0))
    buffer.zero_()


def test_slots_of_one_pinned_block_are_closed_one_by_one(laggard_device):
    floats = mmap.PAGESIZE // 4
    ring = torch.zeros(4 * floats).pin_memory().view(4, floats)
    events = [torch.Event(laggard_device) for _ in range(4)]
    for slot in range(4):
        ring[slot].copy_(
            torch.full((floats,), float(slot), device=laggard_device), non_blocking=True
        )
        events[slot].record()
        events[slot].synchronize()
        assert ring[: slot + 1, 0].tolist() == [float(i) for i in range(slot + 1)]
    ring[0].copy_(torch.ones(floats, device=laggard_device), non_blocking=True)
    ring[1].fill_(7)  # slot 0 alone is in flight
    torch.accelerator.synchronize()
    assert ring[:2, 0].tolist() == [1.0, 7.0]


def test_pageable_memory_is_staged_at_the_call(laggard_device):
    host = torch.ones(4)
    there = host.to(laggard_device, non_blocking=True)
    host.fill_(9)
    assert there.tolist() == [1.0] * 4


def test_pinned_memory_lives_until_its_copy_is_done():
    with laggard.lazy_schedule():
        there = torch.full((4000,), 3.0).pin_memory().to("laggard", non_blocking=True)
        # The buffer has no owner any more; the copy has not run.
        assert there.sum().item() == 12000.0
