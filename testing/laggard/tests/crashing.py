"""Programs that should crash, each in a process of its own: python crashing.py NAME."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import torch

import laggard

CLOSED = "touched pinned memory while a copy of it was in flight"


def host_touches_device_memory() -> None:
    x = torch.ones(4, device="laggard")
    torch.accelerator.synchronize()
    ctypes.c_float.from_address(x.data_ptr()).value  # noqa: B018 CRASH


def host_reads_a_copy_early() -> None:
    buffer = torch.empty(4, pin_memory=True)
    buffer.copy_(torch.ones(4, device="laggard"), non_blocking=True)
    buffer.tolist()  # CRASH


def host_overwrites_a_source_early() -> None:
    buffer = torch.ones(4).pin_memory()
    buffer.to("laggard", non_blocking=True)
    assert buffer.tolist() == [1.0] * 4  # a read is allowed
    buffer.fill_(9)  # CRASH


def host_waits_for_the_wrong_event() -> None:
    buffer, early = torch.empty(4, pin_memory=True), torch.Event("laggard")
    early.record()
    buffer.copy_(torch.ones(4, device="laggard"), non_blocking=True)
    early.synchronize()
    buffer.tolist()  # CRASH


def host_reads_registered_memory_early() -> None:
    shared = torch.frombuffer(mmap.mmap(-1, 8 * mmap.PAGESIZE), dtype=torch.float32)
    torch.laggard.register_host_memory(shared.data_ptr(), 8 * mmap.PAGESIZE)
    half = shared[: len(shared) // 2]
    half.copy_(torch.ones(len(half), device="laggard"), non_blocking=True)
    assert shared[-1] == 0  # the other half is open
    half.tolist()  # CRASH


def a_forked_child_may_use_an_unused_device() -> None:
    child = os.fork()
    if child == 0:
        os._exit(42 if torch.ones(4, device="laggard").tolist() == [1.0] * 4 else 1)
    status = os.waitpid(child, 0)[1]
    sys.exit(os.waitstatus_to_exitcode(status))


def a_forked_child_uses_the_device() -> None:
    torch.ones(4, device="laggard")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(4, device="laggard")
        except RuntimeError as error:
            os._exit(42 if "spawn" in str(error) else 1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    with laggard.random_schedule(1, delay_us=0):
        globals()[sys.argv[1]]()
