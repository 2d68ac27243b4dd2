"""batch="auto": a slow worker gets less of each global batch, which stays the same samples."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from paceline.data.randomness import mix_seeds
from paceline.data.split.order import LocalOrder
from paceline.runtime import job
from support import run_ranks, started
from support.counted import Table
from support.elastic import elastic_job


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


def train(group: Group, samples: int, size: int) -> dict[Any, Any]:
    """Learn with workers of which rank 1 is much slower than the others."""
    table = Table(samples)
    model, optimizer = pl.distribute(table, torch.optim.SGD(table.parameters(), lr=1.0))
    found = {}
    for kind, num_workers in (("batch", 0), ("mode", 1)):
        options: dict[str, Any] = {"batch": "auto"} if kind == "batch" else {"mode": "dynamic"}
        loader = DataLoader(range(samples), size, shuffle=True, num_workers=num_workers)
        steps = found[kind] = list[Any]()
        for epoch in range(2):
            sharded = pl.shard(loader, epoch=epoch, seed=2, **options)
            assert len(sharded) == -(-samples // (size * group.size))
            for batch in sharded:
                weight = job.current().contribution.weight
                # Long against what a busy machine adds to a step of anybody.
                time.sleep((0.03 if group.rank == 1 else 0.0005) * len(batch))
                before = model.w.detach().clone()
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                change = (model.w.detach() - before)[batch].tolist()
                steps.append((batch.tolist(), weight, change))
    return found


def test_a_slow_worker_gets_less_of_the_same_batches() -> None:
    samples, size, workers = 100, 4, 3
    with started(workers, train, samples, size) as ranks:
        found = ranks.values()
        said = ranks.output(0)
    expected = []
    for epoch in range(2):
        order = LocalOrder(samples, mix_seeds(2, epoch)).units(0, samples).tolist()
        expected += [order[at : at + size * workers] for at in range(0, samples, size * workers)]
    for case in found[0]:
        for whole, *parts in zip(expected, *(rank[case] for rank in found), strict=True):
            assert list(chain(*(part for part, _, _ in parts))) == whole
            for part, weight, change in parts:
                assert weight == pytest.approx(len(part) * workers / len(whole))
                # The mean over all samples: each of them has moved its own parameter alike.
                assert change == pytest.approx([-1 / len(whole)] * len(part))
        last = [len(rank[case][-2][0]) for rank in found]  # behind it, a batch is short
        assert last[1] < size and sum(last) == size * workers, (case, last)
    assert "rank 1 takes" in said and "x slower than the fastest" in said, said
    assert "of 12 samples" in said


def test_what_cannot_be_balanced_is_refused() -> None:
    def battery(group: Group) -> None:
        def refuse(pattern: str, given: Any, **options: Any) -> None:
            with pytest.raises(pl.errors.UsageError, match=pattern):
                list(pl.shard(given, **{"batch": "auto", **options}))

        fine = DataLoader(range(20), 2)
        refuse("batch='auto' needs indices, which a stream", DataLoader(Stream(), 2))
        refuse("batch='auto' needs indices", [torch.ones(2)])
        refuse("presharded=True", fine, presharded=True)
        refuse("goes with mode 'shard'", fine, mode="partition")
        batches = BatchSampler(range(20), 2, drop_last=False)
        refuse("made by a batch sampler", DataLoader(range(20), batch_sampler=batches))
        refuse("made by the dataset", DataLoader(range(20), batch_size=None))
        sampled = DataLoader(range(20), 2, sampler=range(5, 15))
        seen = torch.zeros(20)
        for batch in pl.shard(sampled, batch="auto"):
            seen[batch] += job.current().contribution.weight > 0
        group.all_reduce(seen)
        assert seen.tolist() == [float(5 <= index < 15) for index in range(20)]

    run_ranks(2, battery)


def test_what_an_elastic_job_refuses() -> None:
    def body(group: Group) -> None:
        loader = DataLoader(range(20), 2)
        with pytest.raises(pl.errors.UsageError, match="batch='auto' in an elastic job"):
            pl.shard(loader, batch="auto")
        for mode in ("partition", "replicate"):
            with pytest.raises(pl.errors.UsageError, match=f"mode='{mode}' in an elastic job"):
                pl.shard(loader, mode=mode)
        table = Table(20)
        pl.distribute(table, torch.optim.SGD(table.parameters(), lr=1.0), pace="ssp:2")
        with pytest.raises(
            pl.errors.UsageError, match="with ssp and backup no worker may take many"
        ):
            list(pl.shard(loader, mode="dynamic"))
        sampled = DataLoader(range(20), 2, sampler=range(20))
        other = Table(20)
        pl.distribute(other, torch.optim.SGD(other.parameters(), lr=1.0), pace="async")
        with pytest.raises(pl.errors.UsageError, match="whose order a newcomer cannot know"):
            list(pl.shard(sampled, mode="dynamic"))

    policy = Policy(num_workers=2, num_servers=1, num_partitions=1, is_elastic=True)
    with elastic_job(policy) as elastic:
        elastic.start(body)
        elastic.ranks.values()
