"""Streams, iterators, own data, evaluation and loops while workers are killed and added."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime.job import current
from support import receive, report
from support.counted import Learner, Log, policy
from support.elastic import elastic_job


class Stream(IterableDataset):
    """Numbers in sequence, shared out among the processes of a loader."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.samples, step))


def train_stream(group: Group, kind: str, samples: int) -> None:
    learner = Learner(samples)
    loader = DataLoader(Stream(samples), 2, num_workers=2 if kind == "processes" else 0)
    for epoch in pl.epochs(1000):
        items = [torch.tensor([i]) for i in range(samples)]
        found: Any = {"list": items, "iterator": iter(items)}.get(kind, loader)
        for batch in pl.shard(found):
            learner.step(epoch, batch)


@pytest.mark.parametrize(
    "kind",
    [
        "processes",
        "iterator",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("plain", "list")),
    ],
)
def test_samples_of_a_stream_count_once(kind: str) -> None:
    samples = 100 if kind in ("list", "iterator") else 180
    with elastic_job(policy(3)) as job:
        job.start(train_stream, kind, samples)
        log = Log(job)
        log.receive(0, more=8)
        job.ranks.kill(1)
        log.receive(0, epoch=1, more=8)
        newcomer = job.add()
        log.receive(newcomer)
        log.receive(newcomer, epoch=log.heard[newcomer][0] + 1)
        log.stop(0, killed=[1])
        log.require_once(samples)


def train_own(group: Group, samples: int) -> None:
    """Each number has every third sample; a replacement leaves out what was used."""
    learner = Learner(samples)
    number = current().env.number
    loader = DataLoader(range(number, samples, 3), 2)
    for epoch in pl.epochs(1000):
        for batch in pl.shard(loader, presharded=True):
            learner.step(epoch, batch)


def test_a_replacement_with_its_own_data_goes_on_where_the_others_are() -> None:
    with elastic_job(policy(3)) as job:
        job.start(train_own, 150)
        log = Log(job)
        log.receive(0, more=5)
        job.ranks.kill(1)
        log.receive(0, more=3)
        newcomer = job.add(number=1)
        log.receive(newcomer)
        came = log.heard[newcomer][0]
        log.receive(newcomer, epoch=came + 2)
        log.stop(0, killed=[1])
        epochs = log.by_epoch()
        left_out: set[int] = set()
        for epoch in range(came + 1):
            assert max(epochs[epoch].values()) == 1
            left_out |= {sample for sample in range(150) if epochs[epoch][sample] == 0}
        assert left_out and all(sample % 3 == 1 for sample in left_out)  # only the lost one's
        assert epochs[came + 1] == Counter(range(150))


def evaluate(group: Group, samples: int) -> list[int]:
    learner = Learner(8)
    loader, test = DataLoader(range(8), 1), DataLoader(range(samples), 2)
    seen = []
    for round_ in pl.epochs(2):
        for batch in pl.shard(loader):
            learner.step(round_, batch)
        mine = torch.zeros(samples, dtype=torch.int64)
        for number, batch in enumerate(pl.shard(test, pad=False)):
            mine[batch] += 1
            if number == 3 and current().env.rank == 2 and round_ == 0:
                report("evaluates")
                receive()  # the test ends it here
        pl.world().all_reduce(mine)
        seen.append(mine.tolist())
    return seen


def test_what_a_lost_worker_has_evaluated_is_evaluated_again() -> None:
    with elastic_job(policy(3)) as job:
        job.start(evaluate, 50)
        while job.ranks.receive(2) != "evaluates":
            pass
        job.ranks.kill(2)
        outcomes = job.ranks.wait(60)
        assert [o.status for o in outcomes] == [0, 0, -signal.SIGKILL], "\n".join(
            map(str, outcomes)
        )
        for outcome in outcomes[:2]:
            assert outcome.value == [[1] * 50, [1] * 50]


def train_and_pause(group: Group, kind: str, samples: int) -> None:
    """Worker 1 stops in the middle of its tenth step; so the others wait in theirs."""
    learner = Learner(samples)
    number = current().env.number
    loaders = {"indexed": DataLoader(range(samples), 2), "stream": DataLoader(Stream(samples), 2)}
    own = DataLoader(range(number, samples, 3), 2)
    for epoch in pl.epochs(1000):
        found = pl.shard(own, presharded=True) if kind == "own" else pl.shard(loaders[kind])
        for batch in found:
            if number == 1 and current().steps_done == 9:
                report("here")
                receive()
            learner.step(epoch, batch)


@pytest.mark.parametrize(
    "kind", ["indexed", *(pytest.param(k, marks=pytest.mark.slow) for k in ("stream", "own"))]
)
def test_a_newcomer_and_a_loss_in_the_middle_of_one_step(kind: str) -> None:
    """The newcomer has no part in the batches of that step, and takes part with nothing."""
    with elastic_job(policy(3)) as job:
        job.start(train_and_pause, kind, 150)
        log = Log(job)
        log.receive(0, more=8)
        while job.ranks.receive(1, 60) != "here":
            pass
        newcomer = job.add(number=3)
        job.wait_for_member(newcomer)
        job.ranks.kill(1)
        log.receive(newcomer, epoch=2)
        log.stop(0, killed=[1])
        if kind != "own":
            log.require_once(150)


def train_indexed(group: Group, samples: int) -> None:
    learner = Learner(samples)
    loader = DataLoader(range(samples), 1, shuffle=True)
    for epoch in pl.epochs(1000):
        for batch in pl.shard(loader):
            learner.step(epoch, batch)


@pytest.mark.parametrize("rounds", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_newcomers_that_are_lost_while_they_come_in(rounds: int) -> None:
    """What the others had received by then is received again, and changes nothing."""
    chance = random.Random(rounds)
    with elastic_job(policy(2)) as job:
        job.start(train_indexed, 90)
        log = Log(job)
        log.receive(0, more=3)
        killed = []
        for _ in range(rounds):
            first, second = job.add(), job.add()
            job.wait_for_member(second)
            time.sleep(chance.uniform(0, 0.05))
            job.ranks.kill(first)
            killed.append(first)
            log.receive(second, more=3)
            job.ranks.kill(second)
            killed.append(second)
            log.receive(0, more=3)
        log.receive(0, epoch=log.heard[0][0] + 1)
        log.stop(0, killed=killed)
        log.require_once(90)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "own"])
def test_a_replacement_takes_the_lost_workers_part_of_a_step(kind: str) -> None:
    with elastic_job(policy(3, on_loss="replace")) as job:
        job.start(train_and_pause, kind, 150)
        log = Log(job)
        while job.ranks.receive(1, 60) != "here":
            pass
        job.ranks.kill(1)
        newcomer = job.add(number=1)
        assert job.ranks.receive(newcomer, 60) == "here"  # it computes the same step
        job.ranks.send(newcomer, "go on")
        log.receive(newcomer, epoch=2)
        log.stop(0, killed=[1])
        log.require_once(150)


def count_steps(group: Group) -> None:
    learner = Learner(90)
    batches = forever(DataLoader(range(90), 1, shuffle=True))
    for step in pl.steps(100_000):
        assert step == current().steps_done
        learner.step(0, next(batches))


def forever(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        yield from pl.shard(loader)


def test_a_newcomer_counts_steps_as_the_others_do() -> None:
    with elastic_job(policy(2)) as job:
        job.start(count_steps)
        log = Log(job)
        log.receive(0, more=60)  # in the second pass
        newcomer = job.add()
        log.receive(newcomer, more=90)
        log.stop(0)


class Noisy(Dataset):
    """Samples with noise of all three generators."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> torch.Tensor:
        import numpy as np

        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return noise + index


def train_with_noise(group: Group, num_workers: int, stops: dict[Any, int]) -> list[float]:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    model, optimizer = pl.distribute(net, torch.optim.SGD(net.parameters(), lr=1e-4))
    loader = DataLoader(Noisy(), 2, shuffle=True, num_workers=num_workers)
    number = current().env.number

    def pass_by(where: str) -> None:
        if stops.get((current().steps_done, where)) == number:
            report("here")
            receive()

    for epoch in pl.epochs(3):
        for batch in pl.shard(loader, epoch=epoch):
            loss = model(batch).pow(2).mean()
            pass_by("forward")
            loss.backward()
            pass_by("backward")
            optimizer.step()
            optimizer.zero_grad()
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_replacement_draws_the_same_random_numbers(num_workers: int) -> None:
    """Killed before the others have its gradient, and after; in the first epoch and later."""
    with elastic_job(policy(3, on_loss="replace")) as job:
        job.start(train_with_noise, num_workers, {})
        expected = job.ranks.values(60)[0]
    stops = {(4, "forward"): 1, (14, "backward"): 0, (25, "forward"): 2, (29, "forward"): 1}
    with elastic_job(policy(3, on_loss="replace")) as job:
        job.start(train_with_noise, num_workers, stops)
        holder = {0: 0, 1: 1, 2: 2}  # by number: the rank
        for (_, where), number in stops.items():
            assert job.ranks.receive(holder[number]) == "here"
            job.ranks.kill(holder[number])
            holder[number] = job.add(number=number)
            if where == "forward":  # the replacement comes to this place again
                assert job.ranks.receive(holder[number]) == "here"
                job.ranks.send(holder[number], "go on")
        outcomes = job.ranks.wait(60)
        finished = [o for o in outcomes if o.status == 0]
        assert len(finished) == 3, "\n".join(map(str, outcomes))
        assert all(o.value == expected for o in finished)
