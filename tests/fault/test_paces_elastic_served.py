"""Methods whose centre is on servers, or that have these count votes, while workers and servers are
killed, replaced and added."""

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
from paceline.ps import messages as m
from paceline.runtime.job import current
from support import receive, report
from support.elastic import ElasticJob, elastic_job

SLOW = pytest.mark.slow
PACES = [
    *("diloco:4", "bitmap"),
    *(pytest.param(p, marks=SLOW) for p in ("local:4", "bmuf:4[after=6]", "easgd:4")),
    pytest.param("diloco:6[fragments=2,delay=1,bucket_mb=0.001]", marks=SLOW),
    pytest.param("bitmap[feedback=yes,bucket_mb=0.001]", marks=SLOW),
]


def policy(workers: int, servers: int = 2, **changes: object) -> Policy:
    options = {"min_workers": 1, "max_workers": 8, "replicas": servers, "num_partitions": servers}
    return Policy(
        num_workers=workers, num_servers=servers, is_elastic=True, **{**options, **changes}
    )  # type: ignore[arg-type]


def digest(model: nn.Module) -> str:
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def versions() -> set[int]:
    """Return how often the servers' values have been moved."""
    links = current().servers
    return {r["version"] for link in links for r in link.ask(m.Stats).wait().reports}


def train(group: Group, pace: str) -> tuple[str, set[int], int]:
    """Train until the test says how far; return what stands for all, and how often it moved."""
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
        found = digest(net)
    assert all(torch.isfinite(p).all() for p in net.parameters())
    return found, versions(), job.steps_done


def wait_for(job: ElasticJob, rank: int, size: int, steps: int = 12) -> None:
    """Wait until a worker has done so many steps among so many."""
    done = 0
    while done < steps:
        _, found = job.ranks.receive(rank)
        done = done + 1 if found == size else 0


def require_same(job: ElasticJob, pace: str, ranks: list[int]) -> None:
    outcomes = job.ranks.wait(60, ranks)
    assert [o.status for o in outcomes] == [0] * len(ranks), "\n".join(map(str, outcomes))
    digests, counts, steps = zip(*(outcome.value for outcome in outcomes), strict=True)
    assert len(set(digests)) == 1, pace
    if pace in ("local:4", "diloco:4", "easgd:4"):  # each meeting has moved the centre once
        assert set.union(*counts) == {max(steps) // 4}  # who replaces another counts one less


@pytest.mark.parametrize("pace", PACES)
def test_a_worker_is_lost_and_another_comes(pace: str) -> None:
    with elastic_job(policy(3)) as job:
        job.start(train, pace)
        wait_for(job, 0, 3)
        time.sleep(random.Random(pace).uniform(0, 0.1))
        job.ranks.kill(1)
        wait_for(job, 0, 2)
        newcomer = job.add()
        wait_for(job, newcomer, 3)
        job.ranks.kill(0, signal.SIGTERM)
        require_same(job, pace, [0, 2, newcomer])


@pytest.mark.parametrize("pace", PACES)
def test_a_server_is_lost_and_a_worker_replaced(pace: str) -> None:
    with elastic_job(policy(2, on_loss="replace")) as job:
        job.start(train, pace)
        wait_for(job, 0, 2)
        time.sleep(random.Random(pace).uniform(0, 0.05))
        job.ranks.kill(2 + random.Random(pace).randrange(2))
        wait_for(job, 0, 2)
        job.ranks.kill(1)
        newcomer = job.add(number=1)
        wait_for(job, newcomer, 2)
        job.ranks.kill(0, signal.SIGTERM)
        require_same(job, pace, [0, newcomer])


def test_free_running_workers_come_and_go() -> None:
    with elastic_job(policy(3)) as job:
        job.start(train_freely, "easgd:3[mode=async]")
        wait_for(job, 0, 3)
        job.ranks.kill(1)
        wait_for(job, 0, 2)
        job.ranks.kill(3)  # a server
        newcomer = job.add()
        wait_for(job, newcomer, 3)
        for rank in (0, 2, newcomer):
            job.ranks.kill(rank, signal.SIGTERM)
        outcomes = job.ranks.wait(60, [0, 2, newcomer])
        assert [o.status for o in outcomes] == [0, 0, 0], "\n".join(map(str, outcomes))


def train_freely(group: Group, pace: str) -> int:
    """Train until this worker is told to stop; it meets nobody."""
    del group
    net = nn.Sequential(nn.Linear(20, 32), nn.Linear(32, 1))
    net, optimizer = pl.distribute(net, torch.optim.SGD(net.parameters(), lr=0.01), pace=pace)
    while not pl.should_stop():
        net(torch.randn(8, 20)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report((current().steps_done, pl.world_size()))
        time.sleep(0.01)
    assert all(torch.isfinite(p).all() for p in net.parameters())
    return current().steps_done


def die_in_a_vote(group: Group, pace: str) -> tuple[str, list[int]]:
    """One worker is killed when it has voted on some buckets of a step; the others go on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    first = net[0].weight  # in the last bucket
    net, optimizer = pl.distribute(net, torch.optim.SGD(net.parameters(), lr=0.01), pace=pace)
    sizes = []
    for step in range(8):
        if step == 4:
            group.barrier()  # nobody is still in the step before when one dies
        if step == 4 and pl.rank() == 1:
            first.register_post_accumulate_grad_hook(lambda _: (report("here"), receive()))
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * pl.rank() + step))
        net(x).pow(2).mean().backward()
        assert all(p.grad.abs().unique().numel() == 1 for p in net.parameters()), "signs"
        sizes.append(pl.world_size())
        optimizer.step()
        optimizer.zero_grad()
    return digest(net), sizes


@pytest.mark.parametrize("pace", ["bitmap[bucket_mb=0.001]", "bitmap[feedback=yes]"])
def test_a_vote_is_settled_among_those_who_are_left(pace: str) -> None:
    with elastic_job(policy(4)) as job:
        job.start(die_in_a_vote, pace)
        assert job.ranks.receive(1) == "here"
        job.ranks.kill(1)
        outcomes = job.ranks.wait(60, [0, 2, 3])
        assert [o.status for o in outcomes] == [0, 0, 0], "\n".join(map(str, outcomes))
        digests, sizes = zip(*(outcome.value for outcome in outcomes), strict=True)
        assert len(set(digests)) == 1
        assert list(sizes) == [[4, 4, 4, 4, 3, 3, 3, 3]] * 3
