"""Parameters that come from servers of other hosts, again and again: the engine writes them into
memory that the device may still read.
"""

from __future__ import annotations

import torch
from torch import nn

import paceline as pl
from support.devices import run_on_device

APART = [0, 1]  # a worker and a server: what arrives is written by this process


def test_parameters_are_pulled_twice(schedule):
    def body(world) -> float:
        del world
        model = nn.Linear(120, 90, device=pl.device())
        model, optimizer = pl.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), pace="async"
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 120, device=pl.device())).sum().backward()
            optimizer.step()
            model.pull()
            model.pull()  # the device may not have read what came before
        return model.weight.detach().sum().item()

    [found] = run_on_device(1, body, schedule=schedule, servers=1, hosts=APART)
    assert torch.isfinite(torch.tensor(found))
