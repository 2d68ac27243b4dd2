"""A learning rate that grows is the same training in one process, by all-reduce and by servers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

WORKERS, STEPS, WARMUP, RATE = 3, 8, 4, 0.01


def model_and_data() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Linear(5, 2).double()
    return model, torch.randn(STEPS, WORKERS, 4, 5, dtype=torch.float64)


def train(group: Group, pace: str) -> tuple[torch.Tensor, list[float]]:
    model, data = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    warmup = pl.GradualWarmup(optimizer, WARMUP)
    rates = []
    for step in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        model(data[step, group.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
    return model.weight.detach().clone(), rates


@pytest.mark.parametrize(("pace", "servers"), [("allreduce", 0), ("ps", 2)])
def test_the_number_of_workers_scales_the_rate(pace: str, servers: int) -> None:
    model, data = model_and_data()
    expected = [RATE * (1 + (WORKERS - 1) * min(t, WARMUP) / WARMUP) for t in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step, rate in enumerate(expected):
        optimizer.param_groups[0]["lr"] = rate
        model(data[step].reshape(-1, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weight, rates in run_ranks(WORKERS, train, pace, servers=servers):
        assert rates == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(weight, model.weight.detach(), rtol=1e-10, atol=1e-12)
