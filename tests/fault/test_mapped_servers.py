"""Workers see parameters and averages in the memory of the servers of their host, whichever those
are: servers are killed and replaced while scripts read, clip and edit what they see."""

from __future__ import annotations

import time

import torch
from torch import nn

import paceline as pl
from fault.test_served_training import Diary, digest, end_of, policy, wait_for_copies
from paceline.comm.group import Group
from paceline.runtime.job import current
from support import report
from support.elastic import ElasticJob, elastic_job, pause_if_held

STEPS = 160


def train_and_edit(_group: Group, until: int = STEPS) -> None:
    """Train; clip in every second step, edit the parameters in some; tell what is seen where."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 1))
    made = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = pl.distribute(model, made, pace="ps", bucket_mb=0.5)
    (table,) = pl.data_parallel.distribute._switchers[model].training.serving.exchange.tables
    for step in pl.steps(until):
        seed = 1000 * step + current().env.number
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
        model(x).pow(2).mean().backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        if step % 5 == 0:
            with torch.no_grad():
                model[2].weight.clamp_(-0.02, 0.02)
        report((step + 1, sorted(table.mapped.servers), digest(model)))
        pause_if_held(step + 1)


def seen_in(diary: Diary, rank: int, step: int) -> list[int]:
    return diary.steps[rank][step][0]


def seen_after(job: ElasticJob, diary: Diary, step: int) -> list[int]:
    """Let the workers go on to that step; return the servers whose memory worker 0 sees then."""
    job.hold_behind(step)
    diary.receive_until(0, step)
    return seen_in(diary, 0, step)


def test_workers_map_the_memory_of_the_servers_that_serve_them() -> None:
    with elastic_job(policy()) as job:
        job.start(train_and_edit)
        end_of(job, [0, 1])
        diary = Diary(job)
        diary.receive_rest()
        expected = diary.states()
    assert seen_in(diary, 0, STEPS) == seen_in(diary, 1, STEPS) == [2, 3]

    with elastic_job(policy()) as job:
        job.hold_behind(20)
        job.start(train_and_edit)
        diary = Diary(job)
        diary.receive_until(0, 20)
        job.ranks.kill(2)
        assert seen_after(job, diary, 30) == [3], "the backup has taken over, with its own memory"
        new, step = job.add("server", 0), 30
        wait_for_copies(job)
        # It holds copies that it was sent. What it comes to serve moves to where workers map it.
        while new not in seen_in(diary, 0, step):
            assert step < STEPS - 50, f"server {new} serves nothing that workers map"
            time.sleep(0.1)
            step += 10
            seen_after(job, diary, step)
        wait_for_copies(job)
        job.ranks.kill(3)
        assert seen_after(job, diary, step + 10) == [new]
        job.let_go()
        end_of(job, [0, 1])
        diary.receive_rest()
    assert diary.states() == expected
