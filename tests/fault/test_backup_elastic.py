"""Backup workers in elastic jobs: who is lost is a backup that does not come, then not counted."""

from __future__ import annotations

import hashlib
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


def policy(workers: int, **changes: object) -> Policy:
    options = {"num_servers": 2, "replicas": 2, "num_partitions": 4, **changes}
    return Policy(num_workers=workers, min_workers=1, max_workers=8, is_elastic=True, **options)  # type: ignore[arg-type]


def counts() -> dict[int, int]:
    """Return by worker: how many of its steps the server knows of."""
    reports = [r for link in current().servers for r in link.ask(m.Stats).wait().reports]
    (table,) = reports  # on one of the partitions
    return {one["worker"]: one["updates"] + one["dropped"] for one in table["workers"]}


def train(group: Group, pace: str, slow: int) -> dict:
    """Train until the test says stop; one worker takes three times as long."""
    del group
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    net, optimizer = pl.distribute(net, torch.optim.Adam(net.parameters(), lr=0.01), pace=pace)
    job, steps, losses = current(), 0, []
    while not pl.should_stop():
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(steps))
        loss = (net(x) - x[:, :1]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        losses.append(loss.item())
        report((steps, pl.world_size()))
        time.sleep(0.03 if job.env.number == slow else 0.01)
    (table,) = pl.data_parallel.distribute._switchers[net].training.serving.exchange.tables
    known = counts()[job.env.number]
    table.stand_aside()  # nobody waits for it from now on
    report("aside")
    receive()
    net.pull()
    data = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return {
        "model": hashlib.blake2b(data, digest_size=8).hexdigest(),
        "steps": steps,
        "known": known,
        "learned": losses[-1] < losses[0],
    }


def wait_for(job: ElasticJob, rank: int, size: int, steps: int = 8) -> None:
    """Wait until a worker has done so many steps among so many."""
    done = 0
    while done < steps:
        _, found = job.ranks.receive(rank)
        done = done + 1 if found == size else 0


def stop(job: ElasticJob, ranks: list[int]) -> list[dict]:
    for rank in ranks:
        job.ranks.kill(rank, signal.SIGTERM)
    for rank in ranks:
        while job.ranks.receive(rank) != "aside":
            pass
    for rank in ranks:
        job.ranks.send(rank, "go")
    outcomes = job.ranks.wait(60, ranks)
    assert [o.status for o in outcomes] == [0] * len(ranks), "\n".join(map(str, outcomes))
    found = [outcome.value for outcome in outcomes]
    assert len({one["model"] for one in found}) == 1
    return found


def test_workers_are_lost_until_one_is_left_and_others_come() -> None:
    with elastic_job(policy(4)) as job:
        job.start(train, "backup:1", 2)
        wait_for(job, 0, 4)
        job.ranks.kill(1)  # a backup that does not come
        wait_for(job, 0, 3)
        job.ranks.kill(2)  # the slow one; from now on one of two is enough
        wait_for(job, 0, 2)
        job.ranks.kill(4)  # a server: the other one goes on with what it knows of the round
        job.ranks.kill(3)
        wait_for(job, 0, 1)
        newcomers = [job.add(), job.add()]
        for newcomer in newcomers:
            wait_for(job, newcomer, 3)
        found = stop(job, [0, *newcomers])
        assert found[0]["steps"] == found[0]["known"], "each of its steps counted, or was dropped"
        assert found[0]["learned"]


@pytest.mark.parametrize("backups", [1, 2])
def test_a_place_is_kept_for_a_replacement(backups: int) -> None:
    with elastic_job(policy(3, on_loss="replace")) as job:
        job.start(train, f"backup:{backups}", 0)
        wait_for(job, 0, 3)
        job.ranks.kill(1)
        newcomer = job.add(number=1)
        wait_for(job, newcomer, 3)
        job.ranks.kill(0)
        other = job.add(number=0)
        wait_for(job, other, 3)
        found = stop(job, [other, newcomer, 2])
        assert found[2]["steps"] == found[2]["known"]
        assert found[2]["learned"]
