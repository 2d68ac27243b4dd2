"""A Trainer while workers are killed and others come: in the middle of steps that have several
batches, of epochs, of evaluations."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from paceline.runtime.job import current
from support import receive, report
from support.elastic import ElasticJob, elastic_job


class Slowly(pl.Callback):
    """Tells the test how far it is; stops all when the test wants it. One that runs free, and would
    soon be done, may have to wait for the test."""

    def __init__(self, halts_at: int) -> None:
        self.is_enough, self.halts_at = False, halts_at
        signal.signal(signal.SIGUSR2, self._enough)

    def _enough(self, *_: Any) -> None:
        self.is_enough = True

    def on_step_end(self, trainer: pl.Trainer, batch: Any, loss: float) -> None:
        report((trainer.step, pl.world_size()))
        if trainer.step == self.halts_at and current().env.rank == 0:
            receive()
        trainer.should_stop = trainer.should_stop or self.is_enough
        time.sleep(0.01)


def train(group: Group, pace: str, epochs: int) -> Any:
    del group
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(100, 6), torch.randint(3, (100,)))
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = pl.Trainer(
        *(model, optimizer, F.cross_entropy),
        pace=pace,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step),
        scheduler_every="step",
        accumulate=2,
        metrics={"zeros": lambda outputs, targets: (targets == 0).float().mean()},
        callbacks=[Slowly(halts_at=30 if pace == "async" else 0)],
    )
    zeros = float((data.tensors[1] == 0).float().mean())
    loader, test = DataLoader(data, 2, shuffle=True), DataLoader(data, 7)
    trainer.evaluate(test)  # by a newcomer, this and the next are not done
    trainer.fit(loader, 1, test)
    trainer.evaluate(test)
    result = trainer.fit(loader, epochs - 1, test)
    for row in trainer.history:
        assert row["val_zeros"] == pytest.approx(zeros, rel=1e-5), "each sample was evaluated once"
    with model.agreed():  # type: ignore[operator]
        values = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return {
        "rate": optimizer.param_groups[0]["lr"],
        "steps": trainer.step,
        "values": values,
        "history": trainer.history,
        "has_stopped": result.has_stopped,
    }


def wait_for(job: ElasticJob, rank: int, size: int, steps: int) -> None:
    """Wait until a worker has done so many steps among so many."""
    first, done = -1, 0
    while done < steps:
        number, found = job.ranks.receive(rank, 60)
        first = number if found != size or first < 0 else first
        done = number - first


@pytest.mark.parametrize("pace", ["allreduce", "ps", "local:3"])
def test_a_worker_is_lost_and_another_follows_the_schedule(pace: str) -> None:
    servers = int(pace == "ps")
    policy = Policy(
        num_workers=3, num_servers=servers, is_elastic=True, min_workers=1, max_workers=8
    )
    with elastic_job(policy) as job:
        job.start(train, pace, 1000)
        wait_for(job, 0, 3, 11)
        job.ranks.kill(1)
        wait_for(job, 0, 2, 20)
        newcomer = job.add()
        wait_for(job, newcomer, 3, 20)
        job.ranks.kill(2)
        wait_for(job, 0, 2, 20)
        job.ranks.kill(newcomer, signal.SIGUSR2)
        outcomes = job.ranks.wait(60)
    statuses = [o.status for o in outcomes]
    expected = [0, -9, -9, *(0 for _ in range(servers)), 0]
    assert statuses == expected, "\n".join(map(str, outcomes))
    first, last = outcomes[0].value, outcomes[newcomer].value
    assert first["rate"] == pytest.approx(0.05 * 0.999 ** first["steps"])
    assert first == last, "rates, steps, values and averages are the same"
    epochs = [row["epoch"] for row in first["history"]]
    assert epochs == list(range(len(epochs))) and len(epochs) > 2 and first["has_stopped"]


def test_where_everybody_runs_free_a_replacement_comes_to_the_end_as_well() -> None:
    policy = Policy(num_workers=2, num_servers=1, is_elastic=True, min_workers=1, max_workers=4)
    with elastic_job(policy) as job:
        job.start(train, "async", 12)
        wait_for(job, 0, 2, 15)
        job.ranks.kill(1)
        newcomer = job.add(number=1)
        job.wait_for_member(newcomer)
        job.ranks.send(0, "go on")
        outcomes = job.ranks.wait(60)
    statuses = [o.status for o in outcomes]
    assert statuses == [0, -9, 0, 0], "\n".join(map(str, outcomes))
    assert [row["epoch"] for row in outcomes[0].value["history"]] == list(range(12))
    assert outcomes[newcomer].value["history"][-1]["epoch"] == 11
