"""Elastic jobs on the test device: a worker is lost in a step, a newcomer receives the state."""

from __future__ import annotations

import hashlib
import signal
import time

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.control.membership.policy import Policy
from paceline.runtime.job import current
from support import report
from support.devices import _join_and_run
from support.elastic import ElasticJob, elastic_job

DEVICES = {"PACELINE_DEVICES": "laggard:0,1,0,1,0,1"}


def train(group, pace: str) -> str:
    """Train until the test ends it; return a digest of the model that stands for all."""
    del group
    torch.manual_seed(0)
    layers = (nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1))
    net = nn.Sequential(*layers).to(pl.device())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    net, optimizer = pl.distribute(net, optimizer, pace=pace)
    job = current()
    while not pl.should_stop():
        chance = torch.Generator().manual_seed(1000 * job.env.rank + job.steps_done)
        x = torch.randn(8, 20, generator=chance).to(pl.device())
        net(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report((job.steps_done, pl.world_size()))
        time.sleep(0.01)
    with net.agreed():
        values = [p.detach().cpu() for p in net.parameters()]
    assert all(torch.isfinite(value).all() for value in values)
    data = b"".join(value.numpy().tobytes() for value in values)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def wait_for(job: ElasticJob, rank: int, size: int, steps: int = 8) -> None:
    """Wait until a worker has done so many steps among so many."""
    done = 0
    while done < steps:
        _, found = job.ranks.receive(rank)
        done = done + 1 if found == size else 0


@pytest.mark.parametrize(
    ("pace", "servers", "order"),
    [("allreduce", 0, "1"), ("diloco:4", 0, "lazy"), ("ps", 1, "lazy")],
)
def test_a_worker_is_lost_and_another_comes(pace, servers, order):
    policy = Policy(
        num_workers=2, is_elastic=True, min_workers=1, max_workers=4, num_servers=servers
    )
    with elastic_job(policy, env=DEVICES) as job:
        job.joining = (_join_and_run, (order, True))
        job.start(train, pace)
        wait_for(job, 0, 2)
        job.ranks.kill(1)
        wait_for(job, 0, 1)
        newcomer = job.add()
        wait_for(job, newcomer, 2)
        job.ranks.kill(0, signal.SIGTERM)  # all hear of it at their next agreement
        outcomes = job.ranks.wait()
    workers = [outcomes[rank] for rank in (0, newcomer)]
    assert [o.status for o in workers] == [0, 0], "\n".join(map(str, outcomes))
    assert workers[0].value == workers[1].value
