"""What is in flight when its step has moved on: memory is held, and answers are waited for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import paceline as pl
from paceline.data_parallel.checks.late_check import LateCheck
from support.devices import run_alone_on_device, run_on_device


def test_small_gradients_are_held_until_they_were_unpacked(schedule):
    def body(world) -> None:
        from paceline.comm.device_group import DeviceGroup

        start = DeviceGroup.all_reduce

        def end_at_once(group: DeviceGroup, tensor: torch.Tensor) -> Any:
            work = start(group, tensor)
            torch.accelerator.synchronize()
            return work

        DeviceGroup.all_reduce = end_at_once  # type: ignore[method-assign]
        layers = [nn.Linear(60, 60) for _ in range(6)]
        model = nn.Sequential(*layers).to(pl.device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pl.distribute(
            model, optimizer, pace="allreduce[compress=powersgd:2(min=100)]", bucket_mb=0.015
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 60, device=pl.device())).square().mean().backward()
            optimizer.step()

    run_on_device(2, body, schedule=schedule)


def test_a_check_is_not_looked_at_before_it_was_copied(schedule):
    def body() -> None:
        here = torch.device("laggard:0")
        check = LateCheck(here)
        bad = torch.full((300,), float("nan"), device=here)
        check.launch(3, [("weight", bad)], [bad])
        check.look()  # as a rule it is not known yet, and must not be lost
        torch.accelerator.synchronize()
        assert check.look() and check.found == (3, ["weight"])

    run_alone_on_device(body, schedule=schedule)


def test_an_exchange_is_done_when_the_device_has_done_it():
    def body() -> None:
        from paceline.comm.device_group import StreamResult

        here = torch.device("laggard:0")
        values, event = torch.ones(300, device=here), torch.Event(here)
        values.add_(1)
        event.record()
        result = StreamResult(event)
        assert not result.done()  # nothing has demanded it, and this schedule runs nothing before
        torch.accelerator.synchronize()
        assert result.done()

    run_alone_on_device(body, schedule="lazy")
