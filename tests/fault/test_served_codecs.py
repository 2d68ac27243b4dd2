"""A server is lost while gradients go to it through a codec: every packet is applied once, and what
was left out of it is still there, so nothing of any gradient is lost or counted twice.

The gradient of `(p * c).sum()` is c, and with SGD at a rate of 1 the parameters are minus what the
servers have applied.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from paceline.data_parallel.distribute import _switchers
from paceline.pace.parameter_server import ServerExchange
from paceline.runtime.job import current
from support import report
from support.elastic import elastic_job, pause_if_held

STEPS, SIZE = 40, 40_000


def gradient(worker: int, step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1000 * worker + step))


def push_all(group: Group, pace: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the servers have applied, and what of this worker's gradients still waits."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(SIZE))])
    made = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = pl.distribute(model, made, pace=pace, bucket_mb=0.05)
    number = current().env.number
    for step in pl.steps(STEPS):
        (model[0] * gradient(number, step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step + 1)
        time.sleep(0.005)
        pause_if_held(step + 1)
    group.barrier()
    model.pull()
    training = _switchers[model].training
    assert isinstance(training.exchange, ServerExchange)
    [bucket] = training.reducer.buckets
    waits = training.exchange.left_out(bucket)
    assert waits is not None
    return -model[0].detach().clone(), bucket.slots[0].segment.view(waits).clone()


# Workers and servers: on one host; the servers on other hosts than the workers, and each other.
@pytest.mark.parametrize("hosts", [(), (0, 0, 0, 1, 0), (0, 1, 2, 3, 2)])
@pytest.mark.parametrize(
    "pace", ["async[compress=topk:0.02]", "ps[compress=onebit]", "ps[compress=topk:0.02]"]
)
def test_every_packet_counts_once(pace: str, hosts: tuple[int, ...]) -> None:
    policy = Policy(
        num_workers=2, num_servers=2, is_elastic=True, min_workers=1, replicas=2, num_partitions=2
    )
    with elastic_job(policy) as job:
        job.hosts = hosts
        job.hold_behind(30)  # the loss comes before the end
        job.start(push_all, pace)
        while job.ranks.receive(0) < 10:
            pass
        job.ranks.kill(2)
        while job.ranks.receive(0) < 20:
            pass
        job.add("server", 0)  # which is filled while they go on
        job.let_go()
        outcomes = job.ranks.wait(60, [0, 1])
        assert all(o.status == 0 and o.error is None for o in outcomes), "\n".join(
            map(str, outcomes)
        )
        (applied, waits), (same, others) = (outcome.value for outcome in outcomes)
    assert torch.equal(applied, same)
    total = sum(gradient(worker, step) for worker in range(2) for step in range(STEPS))
    left = waits + others
    if pace.startswith("ps"):
        total, left = total / 2, left / 2
    torch.testing.assert_close(applied + left, total, rtol=1e-4, atol=5e-4)
