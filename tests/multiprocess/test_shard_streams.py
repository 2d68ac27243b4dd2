"""pl.shard over data that only comes in sequence, and over data that is split already."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime import job
from support import run_ranks, started


class Numbers(IterableDataset):
    """A stream of numbers, divided among DataLoader workers as PyTorch's manual does it."""

    def __init__(self, stop: int) -> None:
        self.stop, self.epochs = stop, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.stop, step))


class Sized(Numbers):
    def __len__(self) -> int:
        return self.stop


def weighed(sharded: Any) -> list[tuple[Any, float]]:
    contribution = job.current().contribution
    taken = [(b.tolist() if hasattr(b, "tolist") else b, contribution.weight) for b in sharded]
    assert contribution.weight == 1.0
    return taken


def union(passes: list[list[tuple[Any, float]]]) -> list[list[Any]]:
    assert len({len(rank) for rank in passes}) == 1, "all ranks make the same number of steps"
    steps = list(zip(*passes, strict=True))
    for step in steps:
        assert sum(weight for _, weight in step) == pytest.approx(len(passes))
    return [sorted(chain.from_iterable(s for s, weight in step if weight)) for step in steps]


def chunks(stop: int, size: int) -> list[list[int]]:
    return [list(range(i, min(i + size, stop))) for i in range(0, stop, size)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_streams_are_strided(world_size: int) -> None:
    def battery(group: Group) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for samples in (24, 25, 29, 4):
            dataset = Numbers(samples)
            loader = DataLoader(dataset, 4, collate_fn=list)  # nothing to count samples by
            found["plain", samples] = weighed(pl.shard(loader))
            assert weighed(pl.shard(loader, epoch=6)) == found["plain", samples]
            assert dataset.epochs == [0, 6]
            sized = pl.shard(DataLoader(Sized(samples), 4))
            assert len(sized) == len(weighed(sized))
            with pytest.raises(TypeError, match="not known"):
                len(pl.shard(loader))
        found["dropped"] = weighed(pl.shard(DataLoader(Numbers(29), 4, drop_last=True)))
        found["global"] = weighed(pl.shard(DataLoader(Numbers(24), 5), batch="global"))
        found["items"] = weighed(pl.shard(DataLoader(Numbers(10), batch_size=None)))
        found["workers"] = weighed(pl.shard(DataLoader(Numbers(50), 4, num_workers=2)))
        mine = weighed(pl.shard(DataLoader(Numbers(10), 2), pad=False))
        assert [x for batch, _ in mine for x in batch] == list(range(group.rank, 10, group.size))
        return found

    with started(world_size, battery) as started_ranks:
        ranks = started_ranks.values()
        warned = started_ranks.output(0).count("reads the whole stream of Numbers")
        assert (warned > 0) == (world_size > 1)
    n = world_size
    for samples in (24, 25, 29, 4):
        got = union([rank["plain", samples] for rank in ranks])
        assert got == chunks(samples, 4 * n)
    full = [batch for batch in chunks(29, 4 * n) if len(batch) == 4 * n]
    assert union([rank["dropped"] for rank in ranks]) == full
    assert union([rank["global"] for rank in ranks]) == chunks(24, 5)
    items = [[(x, 1.0) for x, weight in rank["items"] if weight] for rank in ranks]
    assert sorted(x for rank in items for x, _ in rank) == list(range(10))
    got = union([rank["workers"] for rank in ranks])
    assert sorted(chain(*got)) == list(range(50))
    assert got[0] == list(range(0, 8 * n, 2)) and got[1] == list(range(1, 8 * n, 2))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_plain_iterables_are_strided_by_batches(world_size: int) -> None:
    def battery(group: Group) -> dict[Any, Any]:
        batches = [torch.arange(i, i + size) for i, size in ((0, 4), (4, 2), (6, 3), (9, 1))]
        sharded = pl.shard(batches)
        found = {"list": weighed(sharded)}
        assert len(sharded) == len(found["list"]) == -(-4 // group.size)
        unpadded = pl.shard(batches, pad=False)
        assert len(unpadded) == len(weighed(unpadded)) == len(range(group.rank, 4, group.size))
        generator = (batch for batch in batches)
        assert weighed(pl.shard(generator)) == found["list"]
        with pytest.raises(pl.errors.UsageError, match="no batch at all.*once only"):
            list(pl.shard(generator))
        return found

    ranks = run_ranks(world_size, battery)
    made = [list(range(0, 4)), [4, 5], [6, 7, 8], [9]]
    expected = [list(chain(*made[i : i + world_size])) for i in range(0, len(made), world_size)]
    assert union([rank["list"] for rank in ranks]) == expected


def test_data_that_is_split_already_stays_so() -> None:
    def battery(group: Group) -> None:
        rank, n = group.rank, group.size
        batches = [torch.full((1 + rank, 2), float(i)) for i in range(2 + rank)]
        sharded = pl.shard(batches, presharded=True)
        assert len(sharded) == 1 + n
        taken = weighed(sharded)
        assert [batch for batch, weight in taken if weight] == [b.tolist() for b in batches]
        assert len(taken) == 1 + n
        for step, (batch, weight) in enumerate(taken):
            having = [r for r in range(n) if step < 2 + r]
            total = sum(1 + r for r in having)
            assert weight == pytest.approx((1 + rank) * n / total if rank in having else 0.0)
            if rank not in having:
                assert batch == batches[-1].tolist()
        alone = pl.shard(batches, presharded=True, pad=False)
        assert len(alone) == len(weighed(alone)) == 2 + rank
        # Whatever kind it is: generators, loaders of different length and batch size.
        taken = weighed(pl.shard(iter(batches), presharded=True))
        assert len(taken) == 1 + n
        own = DataLoader(range(10 * rank, 10 * rank + 5 + rank), 2 + rank)
        got = [x for batch, w in weighed(pl.shard(own, presharded=True)) if w for x in batch]
        assert got == list(range(10 * rank, 10 * rank + 5 + rank))
        stream = DataLoader(Numbers(3 + rank), 2)
        got = [x for batch, w in weighed(pl.shard(stream, presharded=True)) if w for x in batch]
        assert got == list(range(3 + rank))
        sampler = DistributedSampler(range(9), n, rank)
        pl_order = []
        for epoch in (3, 4):
            loader = DataLoader(range(9), 2, sampler=sampler)
            pl_order.append([x for b in pl.shard(loader, epoch=epoch, presharded=True) for x in b])
            assert sampler.epoch == epoch
            assert [x for b in loader for x in b] == pl_order[-1]
        assert pl_order[0] != pl_order[1]

    run_ranks(3, battery)
    run_ranks(1, battery)


def test_streams_between_hosts_and_beside_other_collectives() -> None:
    def battery(group: Group) -> None:
        for batch in pl.shard(DataLoader(Numbers(40), 4)):
            # Asynchronous work of another group is under way while the next batch is agreed on.
            work = group.all_reduce(batch.sum(), async_op=True)
            for inner in pl.shard([torch.ones(2)] * 4):
                assert inner.sum() == 2
            work.wait()

    run_ranks(2, battery, hosts=2)
