"""A worker is lost in the very moment of a change of pace: the others complete the change."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.runtime.job import current
from support import report
from support.elastic import ElasticJob, elastic_job

SLOW = pytest.mark.slow
SCHEDULES = (
    *("allreduce@0, diloco:3@5", "diloco:4@0, allreduce@6", "local:4@0, hogwild[agree=2]@6"),
    *("hogwild[agree=2]@0, bitmap@6", "allreduce@0, ps@5", "ps@0, diloco:3@5"),
    *("bitmap@0, ps@5", "ps@0, bitmap@5"),
)
FAST = ("diloco:4@0, allreduce@6", "ps@0, diloco:3@5")


def policy(workers: int, with_servers: bool, **changes: object) -> Policy:
    servers = {"num_servers": 2, "replicas": 2, "num_partitions": 2} if with_servers else {}
    options = {"min_workers": 1, "max_workers": 8, **servers, **changes}
    return Policy(num_workers=workers, is_elastic=True, **options)  # type: ignore[arg-type]


def die_in_a_change(at: int) -> None:
    """Kill this process when it begins its so-manieth operation with others in a change."""
    counted, inner = [0], PaceSwitcher._change

    def change(self: PaceSwitcher, chosen: object) -> None:
        for name in ("barrier", "all_reduce", "broadcast"):
            setattr(Group, name, counting(getattr(Group, name)))
        inner(self, chosen)  # type: ignore[arg-type]
        report(f"{counted[0]} operations")

    def counting(operation):
        def run(*args, **options):
            counted[0] += 1
            if counted[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **options)

        return run

    PaceSwitcher._change = change  # type: ignore[method-assign]


def train(
    group: Group, pace: str, victim: int, at: int, stops: bool = True
) -> tuple[str, str, int]:
    """Train for some steps, or until the test says stop; one is killed in the change."""
    del group
    job = current()
    if job.env.rank == victim:
        die_in_a_change(at)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    net, optimizer = pl.distribute(net, optimizer, pace=pace)
    while not pl.should_stop() and not (stops and job.steps_done >= 12):
        chance = torch.Generator().manual_seed(1000 * job.env.rank + job.steps_done)
        net(torch.randn(8, 20, generator=chance)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report((job.steps_done, pl.world_size()))
        time.sleep(0.0 if stops else 0.01)
    with net.agreed():
        data = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    assert all(torch.isfinite(p).all() for p in net.parameters())
    now = str(pl.data_parallel.distribute._switchers[net].pace)
    return hashlib.blake2b(data, digest_size=8).hexdigest(), now, job.steps_done


def require_same(job: ElasticJob, ranks: list[int], pace: str) -> None:
    outcomes = job.ranks.wait(60, ranks)
    assert [o.status for o in outcomes] == [0] * len(ranks), "\n".join(map(str, outcomes))
    assert len({outcome.value for outcome in outcomes}) == 1, [o.value for o in outcomes]
    assert outcomes[0].value[1] == pace.rpartition("@")[0].rpartition(", ")[2]


def losses() -> list:
    """Choose places in each change, of 10 at least: some while the old pace still stands."""
    chance = random.Random(0)
    cases = []
    for pace in SCHEDULES:
        for victim in (0, 1):
            early, late = chance.randint(1, 3), chance.randint(4, 10)
            marks = () if pace in FAST and victim == 0 else (SLOW,)
            cases += [pytest.param(pace, victim, at, marks=marks) for at in (early, late)]
    return cases


@pytest.mark.parametrize(("pace", "victim", "at"), losses())
def test_the_others_complete_the_change(pace: str, victim: int, at: int) -> None:
    with elastic_job(policy(3, "ps" in pace)) as job:
        job.start(train, pace, victim, at)
        require_same(job, [rank for rank in range(3) if rank != victim], pace)
        (outcome,) = job.ranks.wait(60, [victim])
        assert outcome.status == -signal.SIGKILL, "what this test is about"


@pytest.mark.parametrize("at", [1, pytest.param(6, marks=SLOW), 9])
@pytest.mark.parametrize(
    "pace", ["ps@0, diloco:3@5", pytest.param("diloco:4@0, hogwild[agree=2]@6", marks=SLOW)]
)
def test_a_replacement_comes_into_the_middle_of_a_change(pace: str, at: int) -> None:
    with elastic_job(policy(3, "ps" in pace, on_loss="replace")) as job:
        job.start(train, pace, 1, at, False)
        (outcome,) = job.ranks.wait(60, [1])
        assert outcome.status == -signal.SIGKILL
        newcomer = job.add(number=1)
        for _ in range(8):
            while job.ranks.receive(newcomer)[1] != 3:
                pass
        job.ranks.kill(0, signal.SIGTERM)
        require_same(job, [0, 2, newcomer], pace)
