"""The checks of `paceline doctor --device`: what the accelerators of this machine can do.

Run as a module in a process of its own, because it imports torch and starts the device. Each line
is a name, what was found, and advice, separated by tabs; a name that begins with "!" is broken.
The copies are those of jobs: pinned memory, streams and events of comm/device_route.py.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from functools import partial

import torch

from paceline.comm import devices
from paceline.comm.device_route import DeviceRoute, mark
from paceline.runtime.formatting import memory_size

_COPY_BYTES = 32 << 20
_REPEATS = 3


def line(name: str, found: str, advice: str = "", *, broken: bool = False) -> None:
    sys.stdout.write(f"{'!' if broken else ''}{name}\t{found}\t{advice}\n")
    sys.stdout.flush()


def main() -> int:
    """Print all checks; return 0 also if there is no accelerator."""
    kind = devices.accelerator()
    if kind is None:
        line("accelerator", "none that this PyTorch can use", "jobs train on the CPU")
        return 0
    count = torch.accelerator.device_count()
    line("accelerator", f"{count} x {kind}", devices.untested_version() or "")
    for index in range(count):
        line(f"{kind}:{index}", _description(torch.device(kind, index)))
    device = torch.device(kind, torch.accelerator.current_device_index())
    backend = devices.collective_backend(device)
    line("collectives", backend or "no backend of its own: exchanges go through host memory")
    registers = _pinned(device)
    _bandwidth(device)
    _order(device)
    _overlap(device)
    line("engine memory", "registered as pinned" if registers else "staged through pinned memory")
    return 0


def _description(device: torch.device) -> str:
    module = devices.module_of(device)
    words = [str(module.get_device_name(device))] if hasattr(module, "get_device_name") else []
    if hasattr(torch.accelerator, "get_memory_info"):  # torch 2.9 and newer
        free, total = torch.accelerator.get_memory_info(device)
        words.append(f"{memory_size(free)} free of {memory_size(total)}")
    return ", ".join(words) or "no description"


def _pinned(device: torch.device) -> bool:
    """Return whether shared memory can be registered with the device."""
    if devices.pinned_like(torch.empty(1), device) is None:
        advice = "copies block the host; raise the limit of locked memory (ulimit -l)"
        line("pinned memory", "cannot be allocated", advice)
    shared = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    pin = devices.register_pinned(shared, device)
    if pin is not None:
        pin.close()
    return pin is not None


def elapsed_s(device: torch.device, action: Callable[[], object]) -> float:
    """Return the shortest of some times of an action, by events of the device."""
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


def _bandwidth(device: torch.device) -> None:
    there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    memory = {"pinned": devices.pinned_like(there, device), "pageable": there.cpu()}
    for name, host in memory.items():
        if host is None:
            continue
        out_s = elapsed_s(device, partial(host.copy_, there, non_blocking=True))
        in_s = elapsed_s(device, partial(there.copy_, host, non_blocking=True))
        rates = [f"{_COPY_BYTES / seconds / 1e9:.1f} GB/s" for seconds in (out_s, in_s)]
        line(f"copies, {name}", f"{rates[0]} to the host, {rates[1]} to the device")


def _order(device: torch.device) -> None:
    """Send numbers to the host and back many times, without a wait of this thread in between."""
    route, size = DeviceRoute(device), 100_000
    hosts = [devices.pinned_like(torch.empty(size), device) for _ in range(4)]
    if None in hosts:
        return
    wrong = 0
    for repeat in range(20):
        source = torch.full((size,), float(repeat), device=device)
        result = torch.empty_like(source)
        host = hosts[repeat % len(hosts)]
        assert host is not None
        out = route.to_host(source.add_(1), host)
        del source
        out.wait_on_host()
        route.to_device(host, result, mark(device)).wait_on_stream()
        wrong += int((result != repeat + 1).sum().item())
    route.settle()
    found = "20 round trips are right" if not wrong else f"{wrong} of {20 * size} numbers are wrong"
    advice = "please report this with the whole output of `paceline doctor --device`"
    line("order of copies", found, advice if wrong else "", broken=bool(wrong))


def _overlap(device: torch.device) -> None:
    """Compare a copy beside a computation with both one after the other."""
    matrix = torch.ones(1024, 1024, device=device)
    there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    host, route = devices.pinned_like(there, device), DeviceRoute(device)
    if host is None:
        return
    target: torch.Tensor = host

    def copy() -> None:
        route.to_host(there, target).wait_on_stream()

    def compute() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def both() -> None:
        copied = route.to_host(there, target)
        compute()
        copied.wait_on_stream()

    products = 1
    copy_s, one_s = elapsed_s(device, copy), elapsed_s(device, compute)
    products = max(1, round(copy_s / one_s))
    compute_s, both_s = elapsed_s(device, compute), elapsed_s(device, both)
    route.settle()
    hidden = (copy_s + compute_s - both_s) / min(copy_s, compute_s)
    line(
        "overlap", f"{100 * max(0.0, min(1.0, hidden)):.0f} % of a copy is hidden by a computation"
    )


if __name__ == "__main__":
    sys.exit(main())
