"""SIGTERM to one worker of a job with servers: in lockstep all stop behind the same step."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import report, started


def train_until_stopped(group: Group, pace: str) -> int:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model, optimizer = pl.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.01), pace=pace, bucket_mb=1e-4
    )
    steps = 0
    while not pl.should_stop():
        if steps == 3:
            report("trains")
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    group.barrier()  # nobody is in a step that the others will not come to
    return steps


@pytest.mark.parametrize("pace", ["ps", "ps[wait=layer]", "ssp:0"])
def test_all_stop_behind_the_same_step(pace: str) -> None:
    with started(3, train_until_stopped, pace, servers=2) as ranks:
        for rank in range(3):
            assert ranks.receive(rank) == "trains"
        ranks.kill(1, signal.SIGTERM)
        steps = ranks.values(60)[:3]
    assert len(set(steps)) == 1 and steps[0] > 3


def test_signals_to_all_at_different_moments_are_one_wish() -> None:
    """As the launcher sends them: each worker hears of its own in another step than the others."""
    with started(3, train_until_stopped, "ps", servers=1) as ranks:
        for rank in range(3):
            assert ranks.receive(rank) == "trains"
        for rank in range(3):
            ranks.kill(rank, signal.SIGTERM)
        assert len(set(ranks.values(60)[:3])) == 1
