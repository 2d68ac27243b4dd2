"""pl.GradScaler while workers are killed and added, and gradients overflow now here, now there."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from paceline.runtime.job import current
from support import report
from support.elastic import ElasticJob, elastic_job

SLOW = pytest.mark.slow
PACES = (
    "allreduce",
    "diloco:4",
    "partial:0.6[carry=yes]",
    "ps",
    *(pytest.param(pace, marks=SLOW) for pace in ("local:3", "bitmap", "gossip", "easgd:4")),
)


def train(group: Group, pace: str) -> list[float]:
    """Train until the test says how far; return the model that stands for all."""
    del group
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    scaler = pl.GradScaler(init_scale=1024.0, growth_interval=5)
    pl.init()
    pl.carry(scaler=scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer = pl.distribute(net, optimizer, pace=pace, precision="fp16")
    job, tries = current(), 0
    while not pl.should_stop():
        tries += 1
        chance = torch.Generator().manual_seed(1000 * job.env.rank + tries)
        loss = net(torch.randn(8, 20, generator=chance)).pow(2).mean()
        if (tries + job.env.rank) % 7 == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        report((job.steps_done, pl.world_size(), scaler.get_scale()))
        time.sleep(0.01)
    assert all(torch.isfinite(p).all() for p in net.parameters())
    with net.agreed():
        return nn.utils.parameters_to_vector(net.parameters()).tolist()


def wait_for(job: ElasticJob, rank: int, size: int, steps: int = 12) -> None:
    """Wait until a worker has done so many steps among so many."""
    first, done = -1, 0
    while done < steps:
        number, found, _ = job.ranks.receive(rank)
        first = number if found != size or first < 0 else first
        done = number - first


@pytest.mark.parametrize("pace", PACES)
def test_a_worker_is_lost_and_another_comes(pace: str) -> None:
    servers = int(pace == "ps")
    policy = Policy(
        num_workers=3, num_servers=servers, is_elastic=True, min_workers=1, max_workers=8
    )
    with elastic_job(policy) as job:
        job.start(train, pace)
        wait_for(job, 0, 3)
        job.ranks.kill(1)
        wait_for(job, 0, 2)
        newcomer = job.add()
        wait_for(job, newcomer, 3)
        job.ranks.kill(0, signal.SIGTERM)
        outcomes = job.ranks.wait()
        statuses = [o.status for o in outcomes]
        assert statuses == [0, -9, 0, *(0 for _ in range(servers)), 0], "\n".join(
            map(str, outcomes)
        )
        assert outcomes[0].value == outcomes[2].value == outcomes[newcomer].value
