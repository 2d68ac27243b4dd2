"""Paces with methods of their own while workers are killed, replaced and added."""

from __future__ import annotations

import hashlib
import random
import signal
import time

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from paceline.runtime.job import current
from support import receive, report
from support.elastic import ElasticJob, elastic_job

PACES = (
    *("local:4", "bmuf:4[after=6]", "diloco:4", "diloco:6[fragments=2,delay=1]"),
    *("easgd:4", "eamsgd:4", "partial:0.6", "partial:0.6[carry=yes]"),
    *("gossip", "gossip:random", "gossip:exponential", "post_local:4[after=20]"),
    *("bitmap", "bitmap[feedback=yes]", "hogwild[agree=4,bucket_mb=0.001]"),
    # Newcomers find the others at another pace than the one that the script begins with.
    *("allreduce@0, diloco:4@5", "local:3@0, allreduce@4, local:4@9"),
)
FAST = (
    *("diloco:4", "easgd:4", "partial:0.6", "bitmap", "hogwild[agree=4,bucket_mb=0.001]"),
    "allreduce@0, diloco:4@5",
)


def policy(workers: int, **changes: object) -> Policy:
    options = {"min_workers": 1, "max_workers": 8, **changes}
    return Policy(num_workers=workers, is_elastic=True, **options)  # type: ignore[arg-type]


def train(group: Group, pace: str) -> str:
    """Train until the test says how far; return a digest of the model that stands for all."""
    del group
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))
    net, optimizer = pl.distribute(net, torch.optim.SGD(net.parameters(), lr=0.01), pace=pace)
    job = current()
    while not pl.should_stop():
        chance = torch.Generator().manual_seed(1000 * job.env.rank + job.steps_done)
        x = torch.randn(8, 20, generator=chance)
        net(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report((job.steps_done, pl.world_size()))
        time.sleep(0.01)
    with net.agreed():
        data = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    assert all(torch.isfinite(p).all() for p in net.parameters())
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def wait_for(job: ElasticJob, rank: int, size: int, steps: int = 12) -> None:
    """Wait until a worker has done so many steps among so many."""
    done = 0
    while done < steps:
        _, found = job.ranks.receive(rank)
        done = done + 1 if found == size else 0


@pytest.mark.parametrize(
    "pace", [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in PACES]
)
def test_a_worker_is_lost_and_another_comes(pace: str) -> None:
    with elastic_job(policy(3)) as job:
        job.start(train, pace)
        wait_for(job, 0, 3)
        time.sleep(random.Random(pace).uniform(0, 0.1))
        job.ranks.kill(1)
        wait_for(job, 0, 2)
        newcomer = job.add()
        wait_for(job, newcomer, 3)
        job.ranks.kill(0, signal.SIGTERM)  # which all hear of at their next meeting
        outcomes = job.ranks.wait()
        assert [o.status for o in outcomes] == [0, -9, 0, 0], "\n".join(map(str, outcomes))
        assert len({outcomes[rank].value for rank in (0, 2, newcomer)}) == 1


def stop_in_step(group: Group, pace: str) -> int:
    """Be killed in the middle of a block; the others count what they have done."""
    del group
    net = nn.Linear(4, 1)
    net, optimizer = pl.distribute(net, torch.optim.SGD(net.parameters(), lr=0.01), pace=pace)
    for step in range(12):
        if step == 6 and pl.rank() == 1:
            report("here")
            receive()
        net(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return current().steps_done


def test_a_loss_between_two_meetings_is_noticed_at_the_next_one() -> None:
    with elastic_job(policy(3)) as job:
        job.start(stop_in_step, "local:4")
        assert job.ranks.receive(1) == "here"
        job.ranks.kill(1)
        outcomes = job.ranks.wait()
        assert [o.value for o in outcomes if o.status == 0] == [12, 12]
