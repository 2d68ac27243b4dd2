"""pl.shard while workers are killed and added, under paces that go through parameter servers."""

from __future__ import annotations

import time

import pytest
from torch.utils.data import DataLoader

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime.job import current
from support import receive, report
from support.counted import Learner, Log, policy
from support.elastic import elastic_job


def train_in_lockstep(group: Group, samples: int) -> None:
    learner = Learner(samples, pace="ps")
    loader = DataLoader(range(samples), 2, shuffle=True)
    for epoch in pl.epochs(1000):
        for number, batch in enumerate(pl.shard(loader, epoch=epoch)):
            if current().env.rank == 1 and (epoch, number) == (0, 10):
                report((current().steps_done, 0, [], 0))
                receive()  # it is killed while it computes
            learner.step(epoch, batch)


def test_samples_count_once_in_lockstep() -> None:
    with elastic_job(policy(3, num_servers=1, num_partitions=1)) as job:
        job.start(train_in_lockstep, 151)
        log = Log(job)
        while job.ranks.receive(1)[3]:
            pass
        time.sleep(0.2)
        job.ranks.kill(1)
        log.receive(0, epoch=1)
        newcomer = job.add()
        log.receive(newcomer)
        log.receive(newcomer, epoch=log.heard[newcomer][0] + 1)
        job.ranks.kill(0, 15)
        outcomes = job.ranks.wait(60, [0, 2, newcomer])
        assert [o.status for o in outcomes] == [0, 0, 0], "\n".join(map(str, outcomes))
        log.receive_rest()
        log.require_once(151)


def run_free(group: Group, samples: int) -> None:
    learner = Learner(samples, pace="async", pause_s=0.02)
    loader = DataLoader(range(samples), 2)
    for epoch in range(50):
        for batch in pl.shard(loader):
            report((current().env.number, epoch, batch.tolist()))
            if current().env.rank == 1 and current().steps_done == 24:
                receive()  # it is killed here, in its 25th step
            learner.train_alone(batch)


@pytest.mark.parametrize("when", ["replaced", pytest.param("joined", marks=pytest.mark.slow)])
def test_free_running_workers_keep_their_parts(when: str) -> None:
    samples = 120
    with elastic_job(policy(3, num_servers=1, num_partitions=1)) as job:
        job.start(run_free, samples)
        told = [job.ranks.receive(1) for _ in range(25)]  # an epoch has 20 batches for each
        job.ranks.kill(1)
        number = 1 if when == "replaced" else 3
        newcomer = job.add(number=number)
        later = [job.ranks.receive(newcomer, 60) for _ in range(30)]
        parts = {n: [[6 * k + 2 * n, 6 * k + 2 * n + 1] for k in range(20)] for n in range(3)}
        assert [batch for _, _, batch in told] == [*parts[1], *parts[1][:5]]
        assert all(batch in parts[number % 3] for _, _, batch in later)
        if when == "replaced":
            # It goes on where the other was: perhaps with a step that was told and not done.
            first = parts[1].index(later[0][2])
            assert later[0][1] == 1 and 3 <= first <= 5
            expected = [*parts[1][first:], *parts[1], *parts[1]]
            assert [batch for _, _, batch in later] == expected[:30]
