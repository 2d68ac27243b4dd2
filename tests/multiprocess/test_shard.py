"""pl.shard over loaders with indices: what the workers get together is what one process gets."""

from __future__ import annotations

from itertools import chain, count
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import paceline as pl
from paceline.comm.group import Group
from paceline.data.randomness import mix_seeds
from paceline.data.split import order
from paceline.runtime import job
from support import run_ranks, started

Passes = list[list[tuple[list[Any], float]]]  # of each rank: batches with their weights


def weighed(sharded: Any) -> list[tuple[list[Any], float]]:
    """Run one pass; every batch with the weight that held while it was handed out."""
    contribution = job.current().contribution
    taken = []
    for batch in sharded:
        samples = batch.tolist() if isinstance(batch, torch.Tensor) else batch
        taken.append((samples, contribution.weight))
    assert contribution.weight == 1.0
    return taken


def union(passes: Passes) -> list[list[Any]]:
    """The samples of every step, of all ranks in rank order, without repeated ones."""
    assert len({len(rank) for rank in passes}) == 1, "all ranks make the same number of steps"
    steps = list(zip(*passes, strict=True))
    for step in steps:
        assert sum(weight for _, weight in step) == pytest.approx(len(passes))
    return [list(chain.from_iterable(s for s, weight in step if weight)) for step in steps]


def chunks(samples: list[Any], size: int) -> list[list[Any]]:
    return [samples[i : i + size] for i in range(0, len(samples), size)]


class Other(Sampler[int]):
    """A sampler that is different on every rank and every time, and knows its epoch."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epochs = samples, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self):
        seed = 1000 * pl.rank() + len(self.epochs)
        generator = torch.Generator().manual_seed(seed)
        return iter(torch.randperm(self.samples, generator=generator).tolist())

    def __len__(self) -> int:
        return self.samples


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_make_up_the_batches_of_one_process(world_size: int) -> None:
    sizes = [(12, 2), (13, 2), (17, 3), (7, 4), (3, 1)]

    def battery(group: Group) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for samples, size in sizes:
            for drop in (False, True):
                if drop and samples < size * group.size:
                    continue
                case = (samples, size, drop)
                loader = DataLoader(range(samples), size, drop_last=drop)
                sharded = pl.shard(loader)
                found["plain", case] = weighed(sharded)
                assert len(sharded) == len(found["plain", case]), case
                for _ in range(2):  # again: the object can be iterated many times
                    assert weighed(sharded) == found["plain", case]
                unpadded = pl.shard(loader, pad=False)
                mine = weighed(unpadded)
                assert len(unpadded) == len(mine)
                assert mine == [part for part in found["plain", case] if part[1]]
                shuffled = DataLoader(range(samples), size, shuffle=True, drop_last=drop)
                found["shuffled", case] = weighed(pl.shard(shuffled, seed=5, epoch=1))
        found["global"] = weighed(pl.shard(DataLoader(range(20), 7), batch="global"))
        return found

    ranks = run_ranks(world_size, battery)
    for case in ranks[0]:
        got = union([rank[case] for rank in ranks])
        if case == "global":
            assert got == chunks(list(range(20)), 7)
            continue
        kind, (samples, size, drop) = case
        if kind == "plain":
            expected = list(range(samples))
        else:
            expected = order.LocalOrder(samples, mix_seeds(5, 1)).units(0, samples).tolist()
        steps = chunks(expected, size * world_size)
        if drop and len(steps[-1]) < size * world_size:
            steps.pop()
        assert got == steps, case


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shuffling_follows_from_seed_and_epoch(world_size: int) -> None:
    def battery(group: Group) -> list[Any]:
        data = list(range(40))
        torch.manual_seed(100 + group.rank)  # rank 0's seed counts

        def samples(sharded: Any) -> list[Any]:
            return weighed(sharded)

        loader = DataLoader(data, 4, shuffle=True)
        counted = [samples(pl.shard(loader)) for _ in range(3)]
        kept = pl.shard(DataLoader(data, 4, shuffle=True))
        assert [samples(kept) for _ in range(3)] == counted
        named = [samples(pl.shard(loader, epoch=e)) for e in (0, 1, 2)]
        assert named == counted
        assert samples(pl.shard(loader)) == samples(pl.shard(loader, epoch=3))
        assert counted[0] != counted[1] != counted[2]
        assert samples(pl.shard(loader, epoch=0, seed=100)) == counted[0]
        assert samples(pl.shard(loader, epoch=0, seed=101)) != counted[0]
        torch.manual_seed(7)  # the seed was agreed on when the loader was first seen
        assert samples(pl.shard(loader, epoch=1)) == counted[1]
        for make in (
            lambda g: DataLoader(data, 4, shuffle=True, generator=g),
            lambda g: DataLoader(data, 4, sampler=RandomSampler(data, generator=g)),
        ):
            generator = torch.Generator().manual_seed(100 + group.rank)
            assert samples(pl.shard(make(generator))) == counted[0]
        return counted

    ranks = run_ranks(world_size, battery)
    alone = [
        chunks(order.LocalOrder(40, mix_seeds(100, e)).units(0, 40).tolist(), 4 * world_size)
        for e in range(3)
    ]
    for epoch in range(3):
        assert union([rank[epoch] for rank in ranks]) == alone[epoch]


class Buckets:
    """A batch sampler with batches of different sizes, in another order on every rank."""

    def __init__(self, made: list[list[int]]) -> None:
        self.made = made

    def __iter__(self):
        return iter(self.made if pl.rank() == 0 else self.made[::-1])

    def __len__(self) -> int:
        return len(self.made)


BUCKETS = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10], [11, 12], [13]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_samplers_of_the_user_decide_with_rank_0(world_size: int) -> None:
    def battery(group: Group) -> dict[str, Any]:
        data, found = list(range(100)), dict[str, Any]()
        torch.manual_seed(group.rank)
        order.CHUNK = 10  # many chunks
        other = Other(37)
        loader = DataLoader(data, 3, sampler=other)
        sharded = pl.shard(loader, epoch=8)
        found["other"] = weighed(sharded)
        assert other.epochs == [8] and len(sharded) == len(found["other"])
        found["other again"] = weighed(pl.shard(loader))
        assert other.epochs == [8, 9]
        for name, sampler in {
            "subset": SubsetRandomSampler(range(50, 70)),
            "weighted": WeightedRandomSampler([1.0] * 10, 25),
            "replacement": RandomSampler(data, replacement=True, num_samples=31),
            "some": RandomSampler(data, num_samples=11),
            "keys": [(i, f"k{i}") for i in range(10)],
        }.items():
            keyed = {key: key for key in sampler} if name == "keys" else data
            loader = DataLoader(keyed, 3, sampler=sampler, collate_fn=list)
            found[name] = weighed(pl.shard(loader))
        endless = pl.shard(DataLoader(data, 2, sampler=Endless()))
        with pytest.raises(TypeError, match="not known"):
            len(endless)
        found["endless"] = [(b.tolist(), 1.0) for b, _ in zip(endless, range(30), strict=False)]
        buckets = DataLoader(data, batch_sampler=Buckets(BUCKETS))
        assert len(pl.shard(buckets)) == -(-len(BUCKETS) // group.size)
        found["batches"] = weighed(pl.shard(buckets))
        found["cut batches"] = weighed(pl.shard(buckets, batch="global"))
        mine = weighed(pl.shard(buckets, batch="global", pad=False))  # not all get a part of each
        assert mine == [part for part in found["cut batches"] if part[1]]
        inner = BatchSampler(SequentialSampler(data), 16, False)
        found["no batching"] = weighed(pl.shard(DataLoader(Rows(), batch_size=None, sampler=inner)))
        found["items"] = weighed(pl.shard(DataLoader(Rows(), batch_size=None, sampler=range(10))))
        shuffled = DataLoader(Rows(), batch_size=None, shuffle=True)
        found["shuffled items"] = weighed(pl.shard(shuffled))
        return found

    ranks = run_ranks(world_size, battery)
    got = {name: union([rank[name] for rank in ranks]) for name in ranks[0]}

    generator = torch.Generator().manual_seed(1)
    first = torch.randperm(37, generator=generator).tolist()
    assert got["other"] == chunks(first, 3 * world_size)
    assert sorted(chain(*got["other again"])) == list(range(37))
    assert got["other again"] != got["other"]
    assert sorted(chain(*got["subset"])) == list(range(50, 70))
    assert len(list(chain(*got["weighted"]))) == 25
    assert len(list(chain(*got["replacement"]))) == 31
    assert len(set(chain(*got["some"]))) == 11
    assert got["keys"] == chunks([(i, f"k{i}") for i in range(10)], 3 * world_size)
    assert list(chain(*got["endless"])) == [i % 7 for i in range(30 * 2 * world_size)]
    assert got["batches"] == [list(chain(*step)) for step in chunks(BUCKETS, world_size)]
    for rank, steps in enumerate(zip(*(r["batches"] for r in ranks), strict=True)):
        if len(BUCKETS) - rank * world_size >= world_size:  # whole batches, while there are enough
            assert [s for s, _ in steps] == BUCKETS[rank * world_size : (rank + 1) * world_size]
    assert got["cut batches"] == BUCKETS
    rows = chunks(list(range(100)), 16)
    assert got["no batching"] == [list(chain(*step)) for step in chunks(rows, world_size)]
    assert got["items"] == chunks(list(range(10)), world_size)
    assert sorted(chain(*got["shuffled items"])) == list(range(10))


class Endless:
    def __iter__(self):
        return (i % 7 for i in count())


class Rows:
    """A dataset that takes one index or a list of them."""

    def __getitem__(self, index: Any) -> Any:
        return index if isinstance(index, list) else [index]

    def __len__(self) -> int:
        return 10


def test_the_last_step_is_even_weighted_and_mentioned_once() -> None:
    def battery(group: Group) -> None:
        loader = DataLoader(range(14), 2)  # 6 + 6 + 2 samples for three workers
        contribution = job.current().contribution
        for _ in range(2):
            taken = weighed(pl.shard(loader))
            assert [weight for _, weight in taken] == [1, 1, 1.5 if group.rank < 2 else 0]
            assert taken[2][0] == [[12], [13], [14 - 2]][group.rank]
        assert len(weighed(pl.shard(loader, pad=False))) == (3 if group.rank < 2 else 2)
        assert len(weighed(pl.shard(DataLoader(range(2), 4), pad=False))) == (group.rank < 2)
        # Leaving early, by break or by an exception, gives the weight back.
        for batch in pl.shard(DataLoader(range(4), 2)):
            assert contribution.weight == (1.5 if group.rank == 0 else 0.75), batch
            # A pass in the middle of another one does not disturb it.
            assert all(contribution.weight == 1.0 for _ in pl.shard(DataLoader(range(6), 1)))
            assert contribution.weight == (1.5 if group.rank == 0 else 0.75)
            break
        assert contribution.weight == 1.0
        with pytest.raises(KeyError):
            for _ in pl.shard(DataLoader(range(4), 2)):
                raise KeyError("the user's own")
        assert contribution.weight == 1.0

    with started(3, battery) as ranks:
        ranks.values()
        said = ranks.output(0).count("paceline: shard: a global batch has too few samples")
        assert said == 1
        assert "shard:" not in ranks.output(1)
