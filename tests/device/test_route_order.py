"""Each rule of the route between device and host, alone: order, hold, wait.

Without the rule the vector clocks report a race, or the host touches memory under a copy.
"""

from __future__ import annotations

import torch

from paceline.comm import devices
from paceline.comm.device_route import DeviceRoute
from support.devices import run_alone_on_device

SIZE = 5000


def on_device(value: float) -> torch.Tensor:
    return torch.full((SIZE,), value, device="laggard:0") + 1


def reuse_freed_memory() -> None:
    """Take blocks that were freed and write to them."""
    for _ in range(3):
        torch.zeros(SIZE, device="laggard:0")


def test_sources_are_held_until_they_were_copied(schedule):
    def body() -> list[float]:
        route = DeviceRoute(torch.device("laggard:0"))
        hosts = [torch.empty(SIZE, pin_memory=True) for _ in range(3)]
        for number, host in enumerate(hosts):
            route.to_host(on_device(number), host)  # the next copy looks for ones that are done
            reuse_freed_memory()
        route.settle()
        return [host[7].item() for host in hosts]

    assert run_alone_on_device(body, schedule=schedule) == [1.0, 2.0, 3.0]


def test_targets_are_held_until_they_were_copied(schedule):
    def body() -> None:
        route = DeviceRoute(torch.device("laggard:0"))
        host = torch.ones(SIZE).pin_memory()
        for _ in range(3):
            route.to_device(host, on_device(0))
            reuse_freed_memory()
        route.settle()

    run_alone_on_device(body, schedule=schedule)


def test_a_copy_starts_after_what_this_thread_has_launched(schedule):
    def body() -> list[float]:
        route = DeviceRoute(torch.device("laggard:0"))
        host, back = torch.empty(SIZE, pin_memory=True), torch.full((SIZE,), 9.0).pin_memory()
        x = on_device(2)
        route.to_host(x, host).wait_on_stream()
        x.mul_(2)
        route.to_device(back, x).wait_on_stream()
        x.add_(1)
        route.settle()
        return [host[0].item(), x[0].item()]

    assert run_alone_on_device(body, schedule=schedule) == [3.0, 10.0]


def test_the_host_reads_after_a_wait_for_the_device(schedule):
    def body() -> float:
        device = torch.device("laggard:0")
        host, route = torch.empty(SIZE, pin_memory=True), DeviceRoute(device)
        copied = route.to_host(on_device(3), host)
        devices.synchronize(device)
        assert copied.took_ms >= 0  # both of its events were recorded
        return host[0].item()

    assert run_alone_on_device(body, schedule=schedule) == 4.0
