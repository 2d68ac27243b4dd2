"""Codecs while workers are killed and added: who is left goes on, with what they have left out."""

from __future__ import annotations

import signal

import pytest
import torch
from test_paces_elastic import policy, train, wait_for
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.data_parallel.distribute import _switchers
from paceline.pace.compressed import CompressedAllReduce
from paceline.runtime.job import current
from support import receive, report
from support.elastic import elastic_job

PACES = (
    *("allreduce[compress=onebit(min=8)]", "allreduce[compress=dgc:0.05(min=8,warmup=40)+int8]"),
    *("allreduce[compress=int8(feedback=yes,min=8)]", "allreduce[compress=powersgd:1(min=8)]"),
    *(
        "allreduce[compress=int8(feedback=yes,scales=shared,min=8)]",
        "diloco:4[compress=int4(min=8)]",
    ),
    *("allreduce[compress=randomk:0.1(min=8)]", "local:4[compress=topk:0.1(min=8)]"),
)
FAST = (PACES[0], PACES[1], PACES[3], PACES[6], PACES[7])


@pytest.mark.parametrize(
    "pace", [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in PACES]
)
def test_a_worker_is_lost_and_another_comes(pace: str) -> None:
    with elastic_job(policy(3)) as job:
        job.start(train, pace)
        wait_for(job, 0, 3)
        job.ranks.kill(1)
        wait_for(job, 0, 2)
        newcomer = job.add()
        wait_for(job, newcomer, 3)
        job.ranks.kill(0, signal.SIGTERM)
        outcomes = job.ranks.wait()
        assert [o.status for o in outcomes] == [0, -9, 0, 0], "\n".join(map(str, outcomes))
        assert len({outcomes[rank].value for rank in (0, 2, newcomer)}) == 1


def add_up(group: Group, codec: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what was agreed on since the others were alone, their gradients, and what waits."""
    del group
    net = nn.Linear(64, 40, bias=False)
    net, optimizer = pl.distribute(net, torch.optim.SGD(net.parameters(), lr=0.0), compress=codec)
    job, agreed, given = current(), torch.zeros(40, 64), torch.zeros(40, 64)
    waited = torch.zeros(40, 64)
    for step in range(20):
        if step == 8 and job.env.rank == 1:
            report("here")
            receive()
        chance = torch.Generator().manual_seed(1000 * job.env.rank + step)
        mine = torch.randn(40, 64, generator=chance)
        net(torch.eye(64)).mul(mine.t()).sum().backward()  # the gradient is `mine`
        assert net.weight.grad is not None
        if pl.world_size() == 2 and step > 8:
            agreed += net.weight.grad
            given += mine
        optimizer.step()
        optimizer.zero_grad()
        if step == 8:
            waited = left_out(net)
    return agreed, given + waited, left_out(net)


def left_out(net: nn.Module) -> torch.Tensor:
    training = _switchers[net].training
    exchange = training.exchange
    assert isinstance(exchange, CompressedAllReduce)
    (bucket,) = training.reducer.buckets
    found = exchange.left_out(bucket)
    assert found is not None
    return bucket.slots[0].segment.view(found).clone()


@pytest.mark.parametrize("codec", ["onebit", "topk:0.05+int8", "int8(feedback=yes,scales=shared)"])
def test_who_is_left_loses_nothing(codec: str) -> None:
    """Behind the loss: 2 x what they agree on + what waits = their gradients + what waited."""
    with elastic_job(policy(3)) as job:
        job.start(add_up, codec)
        assert job.ranks.receive(1) == "here"
        job.ranks.kill(1)
        outcomes = job.ranks.wait()
        assert [o.status for o in outcomes] == [0, -9, 0], "\n".join(map(str, outcomes))
        (agreed, given, waits), (_, given2, waits2) = outcomes[0].value, outcomes[2].value
        torch.testing.assert_close(
            2 * agreed + waits + waits2, given + given2, rtol=1e-4, atol=1e-3
        )
