"""The module of devices and the route between a device and the host, on the test device."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import devices
from paceline.comm.device_route import DeviceRoute, ErrandThread, mark
from paceline.comm.devices import choose_device
from paceline.errors import ConfigError
from paceline.runtime.device_request import DeviceRequest
from support.devices import load_device, run_alone_on_device

HERE = "laggard:0"


def test_each_worker_of_a_host_gets_a_device():
    def body() -> None:
        auto, both, shared = DeviceRequest(), DeviceRequest("laggard", (1, 0)), (0, 0, 1)
        assert [str(choose_device(auto, i, 2)) for i in range(2)] == ["laggard:0", "laggard:1"]
        assert [str(choose_device(both, i, 2)) for i in range(2)] == ["laggard:1", "laggard:0"]
        told = DeviceRequest("laggard", shared)
        assert [choose_device(told, i, 3).index for i in range(3)] == [0, 0, 1]
        assert choose_device(DeviceRequest("cpu"), 5, 8) == devices.CPU
        with pytest.raises(ConfigError, match=r"3 workers .* 2 laggard devices.*laggard:0,1,0"):
            choose_device(auto, 0, 3)
        with pytest.raises(ConfigError, match="there is no laggard:2 on this host"):
            choose_device(DeviceRequest("laggard", (2,)), 0, 1)
        with pytest.raises(ConfigError, match="this machine has 2 laggard devices"):
            choose_device(DeviceRequest("cuda"), 0, 1)
        devices.select_device(torch.device("laggard", 1))
        assert torch.empty(1, device="laggard").device.index == 1

    run_alone_on_device(body, schedule="lazy")


def test_what_is_known_about_a_device():
    def body() -> None:
        here = torch.device(HERE)
        assert devices.accelerator() == "laggard" and devices.is_started()
        assert devices.collective_backend(here) == "lagcomm"
        before = devices.memory_of(here)
        kept = torch.zeros(1000, device=here)
        assert before is not None and devices.is_on_device(kept)
        assert devices.memory_of(here).allocated - before.allocated >= 4000
        devices.seed_all(3)
        states = devices.random_states()
        first = torch.rand(4, device=HERE)
        assert len(states) == 2 and devices.set_random_states(states)
        assert torch.equal(torch.rand(4, device=HERE), first)
        assert not devices.set_random_states(states[:1])

    run_alone_on_device(body, schedule="lazy")


def test_a_tensor_goes_to_the_host_and_back_without_a_wait_of_the_script(schedule):
    def body() -> None:
        laggard = load_device()
        here = torch.device(HERE)
        route, out, back = DeviceRoute(here), ErrandThread("out", here), ErrandThread("in", here)
        host = torch.empty(5000, pin_memory=True)
        doubled = torch.empty(5000, device=here)
        laggard.take_synchronizations()
        for round in range(3):
            x = torch.full((5000,), float(round), device=here) + 1
            copied = route.to_host(x, host)
            del x  # the route holds it
            torch.full((5000,), -1.0, device=here)  # takes the block, if it was freed
            free = mark(here)  # `doubled` is not read any more

            def exchange(copied=copied) -> None:
                copied.wait_on_host()
                host.mul_(2)

            sent = out.submit(exchange)
            arrived = back.submit(
                lambda sent=sent, free=free: sent.wait() or route.to_device(host, doubled, free)
            )
            arrived.wait().wait_on_stream()
            found = doubled + 0
        waits = laggard.take_synchronizations()
        assert [w.reason for w in waits] == ["Event.synchronize"] * 3, waits
        assert all("wait_on_host" in w.stack for w in waits)
        assert found.tolist() == [6.0] * 5000
        route.settle()
        out.close(), back.close()

    run_alone_on_device(body, schedule=schedule)


def test_an_errand_raises_its_error_where_somebody_waits():
    def body() -> None:
        thread = ErrandThread("test", torch.device(HERE))
        failed, later = thread.submit(lambda: 1 // 0), thread.submit(lambda: 5)
        assert later.wait() == 5 and failed.done()
        with pytest.raises(ZeroDivisionError):
            failed.wait()
        assert isinstance(failed.error(), ZeroDivisionError)
        thread.close()

    run_alone_on_device(body, schedule="lazy")
