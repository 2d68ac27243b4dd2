"""A model that computes on several streams: its buckets have gradients of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from support.devices import run_on_device
from support.ranks import run_ranks

STEPS = 3


class Branches(nn.Module):
    """A small and a large matrix, each used on a stream of its own.

    The last kernel for their gradients (of `* 2`) is one that no later kernel waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.head = nn.Linear(8, 64), nn.Linear(64, 4)
        self.small = nn.Parameter(torch.randn(64, 64) * 0.1)
        self.large = nn.Parameter(torch.randn(200, 64) * 0.1)
        self.streams: list[torch.Stream] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        one = self._aside(0, x, self.small)
        other = self._aside(1, x, self.large)
        for stream, result in zip(self.streams, (one, other), strict=False):
            current = torch.accelerator.current_stream(x.device)
            current.wait_stream(stream)
            result.record_stream(current)
        return self.head(x + one + other[:, :64])

    def _aside(self, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            return F.linear(x, weight * 2)
        while len(self.streams) <= number:
            self.streams.append(torch.Stream(x.device))
        stream = self.streams[number]
        stream.wait_stream(torch.accelerator.current_stream(x.device))
        with stream:
            result = F.linear(x, weight * 2)
        x.record_stream(stream)
        return result


def train(rank: int, device: torch.device, **options: Any) -> list[torch.Tensor]:
    model = Branches().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pl.distribute(model, optimizer, **options)
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        batch = torch.randn(6, 8).to(device)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for stream in model.streams:  # takes the blocks of gradients that were freed
            with stream:
                torch.zeros(64, 64, device=device)
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def on_cpu(world):
    return train(world.rank, torch.device("cpu"), update="replicated")


def on_device(world):
    return [train(world.rank, pl.device(), via=via) for via in ("device", "host")]


@pytest.fixture(scope="module")
def right() -> list[torch.Tensor]:
    return run_ranks(2, on_cpu)[0]


def test_a_bucket_waits_for_all_streams_of_its_gradients(schedule, right):
    for of_rank in run_on_device(2, on_device, schedule=schedule):
        for found in of_rank:
            torch.testing.assert_close(found, right, rtol=0, atol=0)
