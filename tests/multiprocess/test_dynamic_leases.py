"""pl.shard(mode="dynamic"): a faster worker takes more, and each sample comes once."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

import paceline as pl
from paceline.comm.group import Group
from paceline.data.cursor.resumption import data_state, resume_data
from paceline.runtime import job
from paceline.runtime.job import current
from support import run_ranks
from support.counted import Table


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Own(Sampler[int]):
    """Another one on each rank: rank 0's counts."""

    def __init__(self, count: int, *, has_length: bool = True) -> None:
        self.count, self.has_length = count, has_length

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError("has no length")
        return self.count

    def __iter__(self):
        generator = torch.Generator().manual_seed(pl.rank())
        return iter(torch.randperm(self.count, generator=generator).tolist())


class Trained:
    """A model at some pace, with which batches are used up."""

    def __init__(self, samples: int, pace: str) -> None:
        table = Table(samples)
        self.model, self.optimizer = pl.distribute(
            table, torch.optim.SGD(table.parameters(), lr=1.0), pace=pace
        )

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def taken(sharded: Any, trained: Trained) -> list[tuple[list[int], float]]:
    found = []
    for batch in sharded:
        found.append((batch.tolist(), job.current().contribution.weight))
        trained.step(batch)
    return found


def held_up(sharded: Any, group: Group) -> Any:
    """Yield the batches, the first one after a barrier."""
    for number, batch in enumerate(sharded):
        if number == 0:
            group.barrier()
        yield batch


def samples(batches: list[tuple[list[int], float]]) -> list[int]:
    return list(chain.from_iterable(batch for batch, weight in batches if weight))


def test_a_faster_worker_takes_more_and_each_sample_comes_once() -> None:
    def battery(group: Group) -> dict[str, Any]:
        trained = Trained(400, "async")
        found: dict[str, Any] = {}

        def go(name: str, loader: DataLoader, **options: Any) -> None:
            found[name] = taken(pl.shard(loader, mode="dynamic", **options), trained)

        loader = DataLoader(range(400), 4, shuffle=True)
        for epoch in range(2):
            batches = found[f"epoch {epoch}"] = []
            for number, batch in enumerate(pl.shard(loader, mode="dynamic", seed=5)):
                batches.append((batch.tolist(), job.current().contribution.weight))
                trained.step(batch)
                if number == (0 if group.rank == 0 else 60):
                    group.barrier()  # rank 0 is slow: the other takes 60 batches meanwhile
        go("forked", DataLoader(range(90), 4, num_workers=2, pin_memory=False))
        go("short", DataLoader(range(10), 4))
        go("dropped", DataLoader(range(10), 4, drop_last=True))
        go("sampler", DataLoader(range(60), 4, sampler=Own(60)))
        of_four = BatchSampler(Own(61), 4, drop_last=False)
        go("batches", DataLoader(range(61), batch_sampler=of_four))
        go("cost", DataLoader(range(80), 4), cost=lambda index: 1 + index % 7)
        go("unpadded", DataLoader(range(50), 4), pad=False)
        half = pl.data_warmup(0.5)
        go("warmup", DataLoader(range(80), 4, shuffle=True), warmup=half)
        # A worker that stops early returns its leases to the pool.
        sharded = pl.shard(DataLoader(range(100), 4), mode="dynamic")
        if group.rank == 0:
            first = next(iter(sharded)).tolist()
            found["stopped"] = [(first, 1.0)]
            group.barrier()
        else:
            found["stopped"] = taken(held_up(sharded, group), trained)
        return found

    ranks = run_ranks(2, battery, servers=1)
    every = {"epoch 0": 400, "epoch 1": 400, "forked": 90, "short": 10, "sampler": 60}
    for name, count in {**every, "batches": 61, "cost": 80, "unpadded": 50}.items():
        seen = sorted(chain.from_iterable(samples(rank[name]) for rank in ranks))
        assert seen == list(range(count)), name
        for batch, weight in chain(*(rank[name] for rank in ranks)):
            assert weight == pytest.approx(len(batch) / 4), "a short batch weighs less"
    for epoch in ("epoch 0", "epoch 1"):
        slow, fast = (len(rank[epoch]) for rank in ranks)
        assert fast >= 61 and slow + fast == 100
    orders = [sorted(map(tuple, (b for b, _ in rank["epoch 0"]))) for rank in ranks]
    again = [sorted(map(tuple, (b for b, _ in rank["epoch 1"]))) for rank in ranks]
    assert set(chain(*orders)) != set(chain(*again)), "reshuffled in each epoch"
    whole = sorted(chain(*(rank["dropped"] for rank in ranks)))
    assert [len(batch) for batch, _ in whole] == [4, 4]
    drawn = Counter(chain(*(samples(rank["warmup"]) for rank in ranks)))
    assert len(drawn) == 40 and set(drawn.values()) == {1}
    assert sorted(samples(ranks[1]["stopped"])) == list(range(100))


def test_in_step_each_batch_is_cut_by_cost() -> None:
    def battery(group: Group) -> list[Any]:
        trained = Trained(60, "allreduce")
        loader = DataLoader(range(60), 5)
        costs = [9.0 if index % 15 < 3 else 1.0 for index in range(60)]
        sharded = pl.shard(loader, mode="dynamic", cost=costs)
        assert len(sharded) == 4
        return taken(sharded, trained)

    ranks = run_ranks(3, battery)
    for step, parts in enumerate(zip(*ranks, strict=True)):
        assert list(chain(*(part for part, _ in parts))) == list(range(15 * step, 15 * step + 15))
        for part, weight in parts:
            assert weight == pytest.approx(len(part) * 3 / 15)
    assert [len(part) for part, _ in (rank[0] for rank in ranks)] == [1, 2, 12]


@pytest.mark.parametrize("workers", [2, 3])
def test_a_pass_goes_on_from_what_it_told(workers: int) -> None:
    first = run_ranks(2, interrupted, servers=1)
    counts = Counter(chain(*(before for before, _ in first)))
    assert set(counts.values()) == {1}
    states = [state for _, state in first]
    counts.update(chain(*run_ranks(workers, continued, states, servers=1)))
    assert sorted(counts) == list(range(80)), "nothing is left out"
    again = sum(times - 1 for times in counts.values())
    assert again <= 2 * 2 * 4, "at most the portion that each of the two had in work"


def interrupted(group: Group) -> tuple[list[int], Any]:
    trained = Trained(80, "async")
    before: list[int] = []
    for batch in pl.shard(DataLoader(range(80), 4), mode="dynamic"):
        before += batch.tolist()
        trained.step(batch)
        if len(before) == 20:
            group.barrier()  # all are between two steps
            state = data_state(current())
            group.barrier()
            return before, state
    raise AssertionError("there are 80 samples for two workers")


def continued(group: Group, states: list[Any]) -> list[int]:
    del group
    trained = Trained(80, "async")
    resume_data(current(), states, is_lockstep=False)
    after: list[int] = []
    for batch in pl.shard(DataLoader(range(80), 4), mode="dynamic"):
        after += batch.tolist()
        trained.step(batch)
    return after


def test_what_dynamic_cannot_do_is_refused() -> None:
    def battery(group: Group) -> list[int]:
        def refuse(pattern: str, given: Any, **options: Any) -> None:
            with pytest.raises(pl.errors.UsageError, match=pattern):
                list(pl.shard(given, **{"mode": "dynamic", **options}))

        fine = DataLoader(range(20), 2)
        refuse("needs indices", DataLoader(Stream(), 2))
        refuse("needs indices", [torch.ones(2)])
        refuse("batch='global'", fine, batch="global")
        refuse("presharded=True", fine, presharded=True)
        refuse("cost=... goes with mode='dynamic'", fine, mode="shard", cost=[1] * 20)
        refuse("has 19 numbers, expected 20", fine, cost=[1] * 19)
        refuse("of sample 3 is nan", fine, cost=lambda i: float("nan") if i == 3 else 1.0)
        refuse("of sample 0 is -1", fine, cost=[-1] * 20)
        refuse("are all 0", fine, cost=[0] * 20)
        refuse("expected a number for each sample", fine, cost=["a"] * 20)
        refuse("expected a number for each sample", fine, cost=7)
        refuse("cost is .* on rank 1", fine, cost=[1.0 + group.rank] * 20)
        batches = DataLoader(range(20), batch_sampler=BatchSampler(Own(20), 2, drop_last=False))
        refuse("made by a batch sampler", batches, cost=[1] * 20)
        trained = Trained(20, "async")
        unknown = DataLoader(range(20), 2, sampler=Own(20, has_length=False))
        refuse("Own has no length", unknown)
        return samples(taken(pl.shard(fine, mode="dynamic"), trained))

    both = run_ranks(2, battery, servers=1)
    assert sorted(chain(*both)) == list(range(20)), "the job can continue"


def test_alone_it_is_the_plain_loader() -> None:
    def battery(group: Group) -> None:
        for pace in ("allreduce", "local:4"):
            trained = Trained(22, pace)
            found = taken(pl.shard(DataLoader(range(22), 4), mode="dynamic"), trained)
            expected = [list(range(i, min(i + 4, 22))) for i in range(0, 22, 4)]
            assert found == [(batch, 1.0) for batch in expected]

    run_ranks(1, battery)
