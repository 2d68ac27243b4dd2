"""allreduce on the test device: the bits of the CPU, no race, and no wait of the script."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from support.devices import load_device, run_on_device
from support.ranks import run_ranks

STEPS = 4


def network() -> nn.Module:
    """Convolution with strides of its own, batch norm (buffers), large and small layers."""
    torch.manual_seed(7)
    features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    head = nn.Sequential(nn.Linear(8 * 36, 300), nn.ReLU(), nn.Linear(300, 10))
    return nn.Sequential(features.to(memory_format=torch.channels_last), head)


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 * step + rank)
    return torch.randn(6, 3, 8, 8), torch.randint(0, 10, (6,))


def train(rank: int, device: str, **options: Any) -> list[torch.Tensor]:
    """Train a model for some steps; return its parameters and buffers."""
    model = network()
    if rank:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(-1)  # distribute sends rank 0's
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pl.distribute(model, optimizer, bucket_mb=0.05, **options)
    laggard = load_device() if device != "cpu" else None
    for step in range(STEPS):
        images, labels = (t.to(device) for t in batch_of(rank, step))
        if laggard is not None:
            torch.accelerator.synchronize()
            laggard.take_synchronizations()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if laggard is not None:
            require_no_wait_of_the_script(laggard)
    pl.check_consistency(model, optimizer)
    return [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]


def require_no_wait_of_the_script(laggard: Any) -> None:
    """Only errand threads may have waited for the device."""
    for wait in laggard.take_synchronizations():
        assert "device_route.py" in wait.stack and "wait_on_host" in wait.stack, wait.stack


def on_cpu(world):
    return [
        train(world.rank, "cpu", update="replicated"),
        train(world.rank, "cpu", update="replicated", buffers="average"),
    ]


def on_device(world):
    here = str(pl.device())
    return [
        train(world.rank, here, via="device"),
        train(world.rank, here, via="host"),
        train(world.rank, here, via="device", buffers="average"),
        train(world.rank, here, via="host", buffers="average"),
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[torch.Tensor]]:
    first, second = run_ranks(2, on_cpu)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return first


def test_both_routes_have_the_bits_of_the_cpu(schedule, expected):
    found = run_on_device(2, on_device, schedule=schedule, timeout_s=200)
    plain, averaged = expected
    for of_rank in found:
        for one, right in zip(of_rank, (plain, plain, averaged, averaged), strict=True):
            torch.testing.assert_close(one, right, rtol=0, atol=0)
