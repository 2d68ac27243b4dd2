"""Trips through engine memory: registered, staged, and on a device that fails."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import paceline as pl
from paceline.comm.host_route import Arrival, HostRoute
from paceline.errors import DeviceError
from support.devices import load_device, run_alone_on_device, run_on_device

HERE = "laggard:0"


class Done:
    """An exchange that has ended."""

    def wait(self) -> None:
        pass


def trip(route: HostRoute, host: torch.Tensor, value: float) -> torch.Tensor:
    """Send a tensor, double it on the host, bring it back; nothing waits but errands."""
    source = torch.full((host.numel(),), value, device=HERE)
    result = torch.full((host.numel(),), -1.0, device=HERE)

    def double() -> Done:
        host.mul_(2)
        return Done()

    Arrival(route.bring(route.send(source, host, double), host, result)).wait()
    del source
    return result + 0


def test_registered_and_staged_memory_give_the_same(schedule, capfd):
    def body() -> None:
        block = torch.empty(40_000)
        start = -block.data_ptr() % 4096 // 4  # the first page; the next tensor begins on it, too
        sizes = iter([(start, 5000), (start + 5000, 6000), (start + 12_000, 700)])

        def allocate(count: int, dtype: torch.dtype) -> torch.Tensor:
            begin, size = next(sizes)
            return block[begin : begin + size]

        route = HostRoute(torch.device(HERE), allocate, who="rank 7")
        hosts = [route.allocate(0, torch.float32) for _ in range(3)]
        laggard = load_device()
        torch.accelerator.synchronize()
        laggard.take_synchronizations()
        results = [trip(route, host, n + 1.0) for n in range(2) for host in hosts]
        waits = laggard.take_synchronizations()
        assert all("wait_on_host" in w.stack for w in waits), [w.stack for w in waits]
        for n, result in enumerate(results):
            assert result.tolist() == [2.0 * (n // 3 + 1)] * result.numel(), n
        route.close()
        route.close()

    run_alone_on_device(body, schedule=schedule)


def test_handles_say_whether_an_exchange_has_ended():
    def body() -> None:
        from paceline.pace.through_host.exchange import Trip
        from paceline.pace.through_host.served import _Push

        class Exchange:
            """One that ends when it is told to."""

            def __init__(self) -> None:
                self.ended = threading.Event()

            def wait(self) -> None:
                self.ended.wait(60)

            def done(self) -> bool:
                return self.ended.is_set()

        class Copy:
            """What a trip and a push ask to start a copy."""

            def fetch_step(self, step: int) -> None:
                pass

            def fetch(self, bucket: object) -> None:
                pass

        route = HostRoute(torch.device(HERE), lambda count, dtype: torch.empty(count, dtype=dtype))
        host, exchange = route.allocate(500, torch.float32), Exchange()
        there = torch.ones(500, device=HERE)
        arrival = Arrival(route.bring(route.send(there, host, lambda: exchange), host, there))
        trip, push = Trip(None, Copy(), 0), _Push(Copy(), None, (), 0)
        assert not trip.done() and not push.done()
        trip.inner = push.sent = exchange
        assert not any(handle.done() for handle in (arrival, trip, push))
        exchange.ended.set()
        arrival.wait()
        assert all(handle.done() for handle in (arrival, trip, push))
        route.close()

    run_alone_on_device(body, schedule="lazy")


def test_a_device_that_fails_is_named(schedule):
    def body(world) -> None:
        here = str(pl.device())
        for via in ("host", "device"):
            model = torch.nn.Linear(4, 4, device=here)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            pl.distribute(model, optimizer, via=via)
            table, index = torch.ones(3, 4, device=here), torch.tensor([77], device=here)
            torch.nn.functional.embedding(index, table)  # a kernel that fails, noticed later
            with pytest.raises(DeviceError, match=f"rank {world.rank}: {here} failed: .*start ag"):
                for _ in range(500):
                    model(torch.ones(2, 4, device=here)).sum().backward()
                    time.sleep(0.01)

    run_on_device(2, body, schedule=schedule)


def test_figures_of_a_device_come_from_events(schedule):
    def body(world) -> None:
        from paceline.data_parallel.distribute import distributed
        from paceline.data_parallel.setup import _rate_of

        here = str(pl.device())
        model = torch.nn.Linear(300, 300, device=here)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        other = torch.optim.AdamW(
            model.parameters(), torch.tensor(0.1, device=here), capturable=True
        )
        pl.distribute(model, optimizer, via="host")
        laggard, batch = load_device(), torch.ones(2, 300, device=here)
        torch.accelerator.synchronize()
        laggard.take_synchronizations()
        for _ in range(5):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        [(_, switcher)] = distributed()
        there = switcher.training._setup.on_device
        gauges = [there.laps.mean_ms, there._memory_mb, there._copy_percent]
        [gauge() for gauge in gauges]
        assert _rate_of(optimizer) == 0.1 and _rate_of(other) is None
        waits = laggard.take_synchronizations()
        assert all("wait_on_host" in w.stack for w in waits), [w.stack for w in waits]
        torch.accelerator.synchronize()
        device_ms, memory_mb, percent = (gauge() for gauge in gauges)
        assert there.laps.total_ms > 0 and memory_mb > 1 and 0 < percent <= 200
        assert device_ms is None or device_ms > 0

    run_on_device(2, body, schedule=schedule)
