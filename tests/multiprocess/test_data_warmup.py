"""pl.data_warmup: the first epochs go over the same part of the data, each sample of it once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

import paceline as pl
from paceline import errors
from paceline.comm.group import Group
from support import run_ranks
from support.counted import Learner, Log, policy
from support.elastic import elastic_job

SAMPLES, FRACTION, EPOCHS = 103, 0.2, 2
PART = 21  # of them, rounded up


def passes(group: Group, shuffle: bool, seed: int | None, num_workers: int) -> list[Any]:
    """Run four epochs; return the batches of each, and how many there should have been."""
    torch.manual_seed(5 + group.rank)  # rank 0's counts
    loader = DataLoader(range(SAMPLES), 4, shuffle=shuffle, num_workers=num_workers)
    warmup = pl.data_warmup(FRACTION, epochs=EPOCHS)
    found = []
    for _ in range(4):
        sharded = pl.shard(loader, seed=seed, warmup=warmup, pad=False)
        batches = [batch.tolist() for batch in sharded]
        assert len(batches) == len(
            pl.shard(loader, seed=seed, epoch=len(found), warmup=warmup, pad=False)
        )
        found.append(batches)
    return found


def samples_of(found: list[list[Any]], epoch: int) -> list[int]:
    """The samples of all ranks, step by step."""
    ranks = [rank[epoch] for rank in found]
    longest = max(map(len, ranks))
    return [s for k in range(longest) for rank in ranks if k < len(rank) for s in rank[k]]


@pytest.mark.parametrize(("shuffle", "workers", "num_workers"), [(True, 3, 0), (False, 2, 2)])
def test_the_same_part_comes_once_in_each_of_the_first_epochs(
    shuffle: bool, workers: int, num_workers: int
) -> None:
    found = run_ranks(workers, passes, shuffle, None, num_workers)
    epochs = [samples_of(found, epoch) for epoch in range(4)]
    assert len(epochs[0]) == len(set(epochs[0])) == PART
    assert set(epochs[1]) == set(epochs[0])
    assert (epochs[1] != epochs[0]) is shuffle
    assert (epochs[0] == sorted(epochs[0])) is not shuffle
    assert set(epochs[0]) != set(range(PART)), "drawn, not the first ones"
    for epoch in epochs[2:]:
        assert sorted(epoch) == list(range(SAMPLES))


def test_the_part_follows_from_the_seed_whatever_the_number_of_workers() -> None:
    by_case = [run_ranks(n, passes, True, seed, 0) for n, seed in ((1, 7), (4, 7), (2, 8))]
    one, four, other = (set(samples_of(found, 0)) for found in by_case)
    assert one == four
    assert one != other


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(10))


def refusals(group: Group) -> None:
    warmup = pl.data_warmup(0.1)
    sampler = SubsetRandomSampler(range(20))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (DataLoader(Stream(), 2), {}, "drawn by index"),
        ([torch.zeros(2)] * 8, {}, "a list without indices"),
        (DataLoader(range(20), 2), {"presharded": True}, "presharded=True"),
        (DataLoader(range(20), 2, sampler=sampler), {}, "SubsetRandomSampler"),
        (DataLoader(range(10), 2), {}, r"1 of 10 samples: .* fewer than one each"),
        (DataLoader(range(30), 2, drop_last=True), {}, "3 of 30 samples: .*drop_last=True"),
    ]
    for loader, more, text in cases:
        with pytest.raises(errors.UsageError, match=text):
            pl.shard(loader, warmup=warmup, **more)
    with pytest.raises(errors.UsageError, match="made by pl.data_warmup"):
        pl.shard(DataLoader(range(20), 2), warmup=0.1)  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError, match="warmup is .*0.5.* on rank 1"):
        mine = pl.data_warmup(0.5 if group.rank else 0.25)
        pl.shard(DataLoader(range(20), 2), warmup=mine)
    for wrong in (0, 1.5, -0.1, float("nan"), "much"):
        with pytest.raises(errors.UsageError, match="fraction"):
            pl.data_warmup(wrong)  # type: ignore[arg-type]
    for epochs in (-1, 1.5):
        with pytest.raises(errors.UsageError, match="epochs"):
            pl.data_warmup(0.5, epochs)  # type: ignore[arg-type]


def test_what_cannot_be_drawn_from_is_refused() -> None:
    run_ranks(2, refusals)


def train(group: Group) -> None:
    learner = Learner(SAMPLES)
    loader = DataLoader(range(SAMPLES), 2, shuffle=True)
    for epoch in range(1000):
        for batch in pl.shard(loader, epoch=epoch, warmup=pl.data_warmup(0.5, epochs=2)):
            learner.step(epoch, batch)


def test_each_sample_of_the_part_counts_once_when_workers_come_and_go() -> None:
    with elastic_job(policy(3)) as job:
        job.start(train)
        log = Log(job)
        log.receive(0, more=3)
        job.ranks.kill(2)
        log.receive(0, epoch=1, more=2)
        newcomer = job.add()
        log.receive(newcomer)
        log.receive(newcomer, epoch=3)
        log.stop(newcomer, killed=[2])
        counts = log.by_epoch()
        assert set(counts[0]) == set(counts[1]) and len(counts[0]) == 52
        assert set(counts[2]) == set(range(SAMPLES))
        for epoch in range(3):
            assert set(Counter(counts[epoch]).values()) == {1}, epoch


def train_freely(group: Group) -> str:
    learner = Learner(8, pace="async")
    try:
        for batch in pl.shard(DataLoader(range(8), 2), warmup=pl.data_warmup(0.5)):
            learner.train_alone(batch)
    except errors.UsageError as error:
        return str(error)
    return "no error"


def test_free_running_elastic_jobs_are_refused() -> None:
    with elastic_job(policy(2, num_servers=1)) as job:
        job.start(train_freely)
        for outcome in job.ranks.wait(60)[:2]:
            assert "finds its position in the data by counting steps" in str(outcome.value), outcome
