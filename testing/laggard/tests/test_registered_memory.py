"""Host memory of other owners, pinned by registration: as good as pinned, and closed like it."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

import laggard
from laggard import _C

register, unregister = torch.laggard.register_host_memory, torch.laggard.unregister_host_memory
PAGE = mmap.PAGESIZE


class Shared:
    """Shared memory as tensors: what an engine for communication has."""

    def __init__(self, size: int, *, private: bool = False) -> None:
        flags = mmap.MAP_ANONYMOUS | (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        self._map = mmap.mmap(-1, size, flags=flags)
        self.floats = torch.frombuffer(self._map, dtype=torch.float32)
        self.address = self.floats.data_ptr()


@pytest.fixture(params=["shared", "private"])
def memory(request):
    memory = Shared(8 * PAGE, private=request.param == "private")
    register(memory.address, 8 * PAGE)
    yield memory
    torch.accelerator.synchronize()
    unregister(memory.address)


def test_copies_are_asynchronous_and_right(laggard_device, memory):
    assert memory.floats.is_pinned()
    laggard.take_synchronizations()
    source, event = torch.arange(8.0 * PAGE / 4, device=laggard_device), torch.Event(laggard_device)
    memory.floats.copy_(source, non_blocking=True)
    event.record()
    assert not laggard.take_synchronizations()
    event.synchronize()
    assert torch.equal(memory.floats, torch.arange(8.0 * PAGE / 4))
    memory.floats.fill_(3)
    there = memory.floats[100:5000].to(laggard_device, non_blocking=True)
    assert there.sum().item() == 3 * 4900
    torch.accelerator.synchronize()
    memory.floats.zero_()


def test_only_shared_memory_can_be_closed():
    for private in (False, True):
        memory = Shared(PAGE, private=private)
        register(memory.address, PAGE)
        assert _C.is_closable(memory.address) is not private
        unregister(memory.address)


def test_races_of_streams_are_found_in_registered_memory(memory):
    side = torch.Stream("laggard")
    memory.floats[:100].copy_(torch.ones(100, device="laggard"), non_blocking=True)
    with side:
        memory.floats[:100].to("laggard", non_blocking=True)
    [race] = laggard.take_races()
    assert race.earlier == "copy device to host" and race.later == "copy host to device"


def test_unregistered_memory_is_pageable_again(laggard_device):
    memory = Shared(PAGE)
    for _ in range(2):
        register(memory.address, PAGE)
        unregister(memory.address)
    assert not memory.floats.is_pinned()
    laggard.take_synchronizations()
    memory.floats.copy_(torch.ones(PAGE // 4, device=laggard_device), non_blocking=True)
    assert [sync.reason for sync in laggard.take_synchronizations()] == [
        "copy to memory that is not pinned"
    ]


def test_memory_is_not_unregistered_under_a_copy(memory):
    with laggard.lazy_schedule():
        memory.floats.copy_(torch.ones(2 * PAGE, device="laggard"), non_blocking=True)
        with pytest.raises(RuntimeError, match="while a copy of it is in flight"):
            unregister(memory.address)


def test_wrong_calls_are_refused(memory):
    with pytest.raises(RuntimeError, match="size above 0"):
        register(0, PAGE)
    with pytest.raises(RuntimeError, match="pinned already"):
        register(memory.address + 7 * PAGE + 64, PAGE)
    with pytest.raises(RuntimeError, match="no registered memory"):
        unregister(memory.address + PAGE)
    own = torch.empty(PAGE, pin_memory=True)
    with pytest.raises(RuntimeError, match="no registered memory"):
        unregister(own.data_ptr())


def test_neighbours_of_a_registered_range_stay_open(laggard_device):
    memory = Shared(4 * PAGE)
    begin = memory.address + 64  # neither end is at a page
    register(begin, 3 * PAGE)
    inside = memory.floats[16 : 16 + 3 * PAGE // 4]
    inside.copy_(torch.ones(3 * PAGE // 4, device=laggard_device), non_blocking=True)
    ctypes.c_float.from_address(memory.address).value = 5
    ctypes.c_float.from_address(begin + 3 * PAGE + 4).value = 6
    torch.accelerator.synchronize()
    assert memory.floats[0] == 5 and memory.floats[16] == 1 and inside.sum() == 3 * PAGE // 4
    unregister(begin)
