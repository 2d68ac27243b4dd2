"""mode="dynamic" while workers are killed: leases of the lost are taken by others."""

from __future__ import annotations

import os
import time
from collections import Counter
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime.job import current
from support import receive, report
from support.counted import Learner, Log, Table, policy
from support.elastic import elastic_job

SAMPLES, SIZE = 240, 2


def run_free(group: Group, flag: str) -> None:
    table = Table(SAMPLES)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    model, optimizer = pl.distribute(table, optimizer, pace="async")
    loader = DataLoader(range(SAMPLES), SIZE, shuffle=True)
    for epoch in count():
        if os.path.exists(flag):
            break
        for number, batch in enumerate(pl.shard(loader, mode="dynamic", epoch=epoch, seed=1)):
            if current().env.rank == 1 and (epoch, number) == (1, 3):
                report("stuck")  # in the middle of a lease
                receive()
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            report((epoch, batch.tolist()))


def test_leases_of_a_killed_worker_are_issued_again(tmp_path: Path) -> None:
    flag = tmp_path / "enough"
    with elastic_job(policy(3, num_servers=1, num_partitions=1)) as job:
        job.start(run_free, str(flag))
        lost: list[Any] = []
        while (thing := job.ranks.receive(1, 60)) != "stuck":
            lost.append(thing)
        job.ranks.kill(1)
        newcomer = job.add()
        first = job.ranks.receive(newcomer, 60)
        late = [first]
        while late[-1][0] < first[0] + 2:
            late.append(job.ranks.receive(newcomer, 60))
        flag.touch()
        outcomes = job.ranks.wait(60, [0, 2, newcomer])
        assert [o.status for o in outcomes] == [0, 0, 0], "\n".join(map(str, outcomes))
        done = [lost, late, *(job.processes[rank].told for rank in (0, 2, newcomer))]
        assert first[0] >= 1, "it does nothing of an epoch that is over"
        for epoch in range(late[-1][0]):
            counts = Counter(chain(*(b for part in done for e, b in part if e == epoch)))
            assert sorted(counts) == list(range(SAMPLES)), "nothing is left out"
            twice = {sample for sample, times in counts.items() if times > 1}
            mine = set(chain(*(batch for e, batch in lost if e == epoch)))
            assert twice <= mine, "only what the lost one had done of its lease comes again"
            assert len(twice) <= 3 * SIZE and max(counts.values()) <= 2
            if epoch != 1:
                assert not twice
        assert "epoch 1: 240 samples, each at least once" in job.ranks.output(0)


def test_a_planned_leave_in_the_middle_of_a_lease_repeats_nothing(tmp_path: Path) -> None:
    flag = tmp_path / "enough"
    with elastic_job(policy(3, num_servers=1, num_partitions=1)) as job:
        job.start(run_free, str(flag))
        left: list[Any] = []
        while (thing := job.ranks.receive(1, 60)) != "stuck":
            left.append(thing)
        job.operator.plan_leave([1])
        while 1 in job.operator.status().membership.ranks:
            time.sleep(0.01)
        job.ranks.send(1, None)  # it takes its last step, and leaves
        others = [job.ranks.receive(0, 60)]
        while others[-1][0] < 4:
            others.append(job.ranks.receive(0, 60))
        flag.touch()
        outcomes = job.ranks.wait(60)
        assert [o.status for o in outcomes[:3]] == [0, 0, 0], "\n".join(map(str, outcomes))
        done = [left, others, *(job.processes[rank].told for rank in (0, 1, 2))]
        for epoch in range(3):
            counts = Counter(chain(*(b for part in done for e, b in part if e == epoch)))
            assert set(counts.values()) == {1}, "nothing comes twice"
            # It left in the step of one batch, before it could report that.
            assert len(counts) == SAMPLES - (SIZE if epoch == 1 else 0), "nothing is left out"
        assert "reassigned after a loss" not in job.ranks.output(0)


def learn_in_step(group: Group) -> None:
    learner = Learner(151)
    loader = DataLoader(range(151), 4, shuffle=True)
    for epoch in range(1000):
        costs = [1 + index % 9 for index in range(151)]
        for batch in pl.shard(loader, epoch=epoch, mode="dynamic", cost=costs):
            learner.step(epoch, batch)


def test_in_step_each_sample_counts_once_whoever_is_lost() -> None:
    with elastic_job(policy(3)) as job:
        job.start(learn_in_step)
        log = Log(job)
        log.receive(0, more=5)
        job.ranks.kill(2)
        log.receive(0, epoch=1, more=3)
        newcomer = job.add()
        log.receive(newcomer)
        log.receive(newcomer, epoch=log.heard[newcomer][0] + 1)
        log.stop(newcomer, killed=[2])
        log.require_once(151)
