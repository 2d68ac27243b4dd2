"""pl.shard while workers are killed and added: each sample of an epoch counts once (O4)."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

import paceline as pl
from paceline.comm.group import Group
from paceline.data.cursor.resumption import data_state, resume_data
from paceline.data.split import order
from paceline.observe.telemetry.events import EpochEnded
from paceline.runtime.job import current
from support import run_ranks
from support.counted import Learner, Log, policy
from support.elastic import ElasticJob, elastic_job


def train(group: Group, samples: int, num_workers: int, resize: str) -> None:
    learner = Learner(samples)
    loader = DataLoader(
        range(samples),
        2,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0 and resize == "worker",
    )
    for epoch in range(1000):
        for batch in pl.shard(loader, epoch=epoch, resize=resize):
            learner.step(epoch, batch)


@pytest.mark.parametrize(
    ("kill", "num_workers", "resize"),
    [
        (0, 2, "global"),
        (2, 0, "worker"),
        pytest.param(1, 0, "global", marks=pytest.mark.slow),
        pytest.param(2, 1, "worker", marks=pytest.mark.slow),
    ],
)
def test_each_sample_counts_once(kill: int, num_workers: int, resize: str) -> None:
    with elastic_job(policy(3)) as job:
        job.start(train, 151, num_workers, resize)
        log = Log(job)
        survivor = 1 if kill == 0 else 0
        log.receive(survivor, more=8)
        job.ranks.kill(kill)
        log.receive(survivor, epoch=1, more=8)
        newcomer = job.add()
        log.receive(newcomer)
        log.receive(newcomer, epoch=log.heard[newcomer][0] + 1)
        log.stop(newcomer, killed=[kill])
        log.require_once(151)
        lines = [event for event in job.events if isinstance(event, EpochEnded)]
        assert {line.samples for line in lines} == {151}
        assert sum(line.reissued > 0 for line in lines) == 1  # in the epoch of the loss
        assert any(
            "151 samples, each once; " in o and "reassigned after a loss" in o for o in outputs(job)
        )
        sizes = Counter(len(counted) for _, counted, _ in log.steps.values())
        assert {size for _, _, size in log.steps.values()} == {2, 3}
        if resize == "global":
            assert sizes[6] > 0.8 * sizes.total() and max(sizes) == 6
        else:
            assert sizes[4] > 10 and sizes[6] > 10


def outputs(job: ElasticJob) -> list[str]:
    return [job.ranks.output(rank) for rank in range(len(job.processes))]


def go_on(group: Group, samples: int, path: str) -> None:
    """Go on from a checkpoint of two workers; a newcomer hears from the others instead."""
    resume_data(current(), torch.load(path), is_lockstep=True)
    learner = Learner(samples)
    loader, test = DataLoader(range(samples), 2, shuffle=True), DataLoader(range(9), 2)
    for epoch in range(1000):
        for batch in pl.shard(loader, epoch=epoch):
            learner.step(epoch, batch)
        for _ in pl.shard(test, pad=False):
            pass


def save_early(group: Group, samples: int) -> tuple[list[int], str]:
    loader, test = DataLoader(range(samples), 2, shuffle=True), DataLoader(range(9), 2)
    for epoch in range(2):
        seen = []
        for number, batch in enumerate(pl.shard(loader, epoch=epoch)):
            seen += batch.tolist()
            if (epoch, number) == (1, 7):
                return seen, json.dumps(data_state(current()))
        for _ in pl.shard(test, pad=False):
            pass
    raise AssertionError("it saves before that")


def go_on_late(group: Group, samples: int, path: str) -> None:
    """Go on from a checkpoint, but not before somebody has come."""
    resume_data(current(), torch.load(path), is_lockstep=True)
    learner, loader = Learner(samples), DataLoader(range(samples), 2, shuffle=True)
    while pl.world_size() < 3:
        learner.train_alone(torch.tensor([0]))
    for epoch in pl.epochs(1000):
        for batch in pl.shard(loader, epoch=epoch):
            learner.step(epoch, batch)


def test_one_who_comes_before_a_checkpoint_is_continued_goes_on_from_it_too(tmp_path: Path) -> None:
    def save(group: Group) -> tuple[list[int], str]:
        loader, seen = DataLoader(range(151), 2, shuffle=True), list[int]()
        for epoch in pl.epochs(2):
            for number, batch in enumerate(pl.shard(loader, epoch=epoch)):
                seen += batch.tolist() if epoch == 1 else []
                if (epoch, number) == (1, 7):
                    return seen, json.dumps(data_state(current()))
        raise AssertionError("it saves before that")

    saved = run_ranks(2, save)
    path = str(tmp_path / "states")
    torch.save([json.loads(state) for _, state in saved], path)
    with elastic_job(policy(2)) as job:
        job.start(go_on_late, 151, path)
        newcomer = job.add()
        log = Log(job)
        log.receive(newcomer)
        log.receive(newcomer, epoch=3)
        log.stop(newcomer)
    counts: dict[int, Counter[int]] = {}
    for epoch, counted, _ in log.steps.values():
        counts.setdefault(epoch, Counter()).update(counted)
    assert min(counts) == 1
    for seen, _ in saved:
        counts[1].update(seen)
    assert counts[1] == counts[2] == Counter(range(151))


def test_what_a_checkpoint_left_counts_once_while_workers_come_and_go(tmp_path: Path) -> None:
    saved = run_ranks(2, save_early, 151)
    path = str(tmp_path / "states")
    torch.save([json.loads(state) for _, state in saved], path)
    with elastic_job(policy(3)) as job:
        job.start(go_on, 151, path)
        log = Log(job)
        log.receive(0, more=4)
        job.ranks.kill(1)
        log.receive(0, more=4)
        newcomer = job.add()
        log.receive(newcomer)
        log.receive(newcomer, epoch=log.heard[newcomer][0] + 2)
        log.stop(newcomer, killed=[1])
        counts = log.by_epoch()
        assert min(counts) == 1
        for seen, _ in saved:
            counts[1].update(seen)
        for epoch in range(1, max(counts)):
            assert counts[epoch] == Counter(range(151)), epoch


def accumulate(group: Group, samples: int) -> None:
    learner = Learner(samples)
    sampler = BatchSampler(range(samples), 3, drop_last=False)
    loader = DataLoader(range(samples), batch_sampler=sampler)
    for epoch in pl.epochs(1000):
        batches = list[torch.Tensor]()
        for batch in pl.shard(loader):
            batches.append(batch)
            if len(batches) == 3:
                learner.step(epoch, *batches)
                batches = []
        if batches:
            learner.step(epoch, *batches)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_of_one_step_are_queued_again_together(seed: int) -> None:
    chance = random.Random(seed)
    with elastic_job(policy(3)) as job:
        job.start(accumulate, 140)
        log = Log(job)
        log.receive(0, more=2)
        time.sleep(chance.uniform(0, 0.02))
        job.ranks.kill(1)
        log.receive(0, more=5)
        newcomer = job.add()
        log.receive(newcomer)
        log.receive(newcomer, epoch=log.heard[newcomer][0] + 1)
        log.stop(0, killed=[1])
        log.require_once(140)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_kills_and_joins(seed: int) -> None:
    chance = random.Random(seed)

    def busy(group: Group) -> None:
        learner = Learner(200, pause_s=0.0)
        loader = DataLoader(range(200), 1, shuffle=True)
        for epoch in range(1000):
            for batch in pl.shard(loader, epoch=epoch):
                learner.step(epoch, batch)

    with elastic_job(policy(3)) as job:
        job.start(busy)
        log = Log(job)
        alive = [0, 1, 2]
        for rank in alive:
            log.receive(rank, more=5)
        for _ in range(8):
            time.sleep(chance.uniform(0.0, 0.2))
            job.ranks.kill(alive.pop(chance.randrange(len(alive))))
            alive.append(job.add())
            log.receive(alive[-1])
        log.receive(alive[-1], epoch=log.heard[alive[-1]][0] + 1)
        log.stop(alive[0], killed=set(range(11)) - set(alive))
        log.require_once(200)


class Seeded(Sampler[int]):
    """A sampler that is the same on all workers in the same epoch, or never the same."""

    def __init__(self, samples: int, *, alike: bool) -> None:
        self.samples, self.alike, self.epoch = samples, alike, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        seed = self.epoch if self.alike else time.time_ns()
        shuffled = list(range(self.samples))
        random.Random(seed).shuffle(shuffled)
        return iter(shuffled)


def train_told(group: Group, samples: int, alike: bool) -> None:
    order.CHUNK = 30
    learner = Learner(samples)
    loader = DataLoader(range(samples), 2, sampler=Seeded(samples, alike=alike))
    for epoch in pl.epochs(1000):
        for batch in pl.shard(loader):
            learner.step(epoch, batch)


def test_another_worker_goes_on_with_the_sampler() -> None:
    with elastic_job(policy(3)) as job:
        job.start(train_told, 150, True)
        log = Log(job)
        log.receive(1, more=8)
        job.ranks.kill(0)
        log.receive(1, epoch=1)
        newcomer = job.add()
        log.receive(newcomer)
        log.receive(newcomer, epoch=log.heard[newcomer][0] + 1)
        log.stop(1, killed=[0])
        log.require_once(150)


def test_a_sampler_that_is_never_the_same_cannot_be_continued() -> None:
    with elastic_job(policy(2)) as job:
        job.start(train_told, 150, False)
        log = Log(job)
        log.receive(1, more=8)
        job.ranks.kill(0)
        outcome = job.ranks.wait(60)[1]
        assert "Seeded) gives other indices; seed it identically" in str(outcome.error)
