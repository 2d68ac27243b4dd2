"""Wrong use of pl.shard: the same clear error on every rank, and the job can go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import paceline as pl
from paceline.collectives.group import Group
from support import run_ranks


class Stream(IterableDataset):
    def __init__(self, stop: int) -> None:
        self.stop = stop

    def __iter__(self):
        return iter(range(self.stop))


class Broken:
    def __iter__(self):
        yield 1
        raise OSError("the list of samples is unreadable")


class Nothing:
    def __iter__(self):
        return iter(())


class Odd:
    def __iter__(self):
        return iter([0.5])


def loader_of(samples: int, size: int = 2, **settings: Any) -> DataLoader:
    return DataLoader(range(samples), size, **settings)


def test_before_init() -> None:
    with pytest.raises(pl.errors.UsageError, match=r"call paceline.init\(\) first"):
        pl.shard([1])


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_wrong_everywhere(world_size: int) -> None:
    def battery(group: Group) -> None:
        def refuse(pattern: str, loader: Any, **options: Any) -> None:
            with pytest.raises(pl.errors.UsageError, match=pattern):
                list(pl.shard(loader, **options))

        fine = loader_of(20)
        for epoch in (1.5, "1", True, torch.tensor([1, 2]).numpy()):
            refuse("epoch must be an integer", fine, epoch=epoch)
        refuse(r"epoch must be 0 or more \(got -1\)", fine, epoch=-1)
        refuse("seed must be an integer", fine, seed="x")
        refuse("batch must be 'worker' or 'global'", fine, batch="both")
        refuse("the loader is empty", loader_of(0))
        refuse("the loader is empty", DataLoader(range(5), sampler=Nothing()))
        refuse("no batch at all", [])
        refuse("no batch at all", DataLoader(Stream(0), 2))
        refuse("no batch at all", DataLoader(Stream(1), 2, drop_last=True))
        refuse("fewer than one global batch", loader_of(1, drop_last=True))
        refuse("is a dataset; pass a DataLoader", TensorDataset(torch.ones(4)))
        refuse("expected a DataLoader or an iterable", 7)
        refuse(
            "already gives each worker", loader_of(9, sampler=DistributedSampler(range(9), 3, 1))
        )
        refuse("went through pl.shard already", pl.shard(fine))
        refuse("cuts batches", [torch.ones(2)], batch="global")
        refuse("cuts batches", DataLoader(range(9), batch_size=None), batch="global")
        refuse("index of type float|raised UsageError", DataLoader(range(9), sampler=Odd()))
        if group.size == 3:
            refuse("2 samples for 3 workers, fewer than one each; start at most 2", loader_of(2))
            refuse("global batch of 2 cannot be cut among 3", fine, batch="global")
            refuse("at least the number of workers", DataLoader(Stream(9), 2), batch="global")
            refuse("gives rank 2 of 3 no batch", [1, 2])
            refuse("gives rank 2 of 3 no batch", DataLoader(Stream(2), 1))
        error = OSError if group.rank == 0 else pl.errors.UsageError
        with pytest.raises(error, match="the list of samples is unreadable"):
            list(pl.shard(DataLoader(range(9), sampler=Broken())))
        assert sum(len(batch) for batch in pl.shard(fine)) >= 20 // group.size

    run_ranks(world_size, battery)


def test_what_differs_between_ranks() -> None:
    def battery(group: Group) -> None:
        odd = group.rank == 1

        def refuse(pattern: str, loader: Any, **options: Any) -> None:
            with pytest.raises(pl.errors.UsageError, match=pattern):
                list(pl.shard(loader, **options))

        refuse("the length of the dataset is 21 on rank 1, expected 20", loader_of(20 + odd))
        refuse("batch_size is 3 on rank 1, expected 2", loader_of(20, 2 + odd))
        refuse("drop_last is True on rank 1, expected False", loader_of(20, drop_last=odd))
        refuse("the sampler is 'RandomSampler' on rank 1", loader_of(20, shuffle=odd))
        refuse("epoch is 1 on rank 1, expected 0", loader_of(20), epoch=int(odd))
        refuse("seed is '1' on rank 1, expected '0'", loader_of(20), seed=int(odd))
        refuse("pad is False on rank 1", loader_of(20), pad=not odd)
        refuse("presharded is True on rank 1", [1, 2, 3], presharded=odd)
        refuse("the kind of loader", [1, 2, 3] if odd else loader_of(20))
        refuse("the number of batches is 4 on rank 1, expected 3", [1, 2, 3] + [4] * odd)
        refuse(r"\(rank 1\): epoch must be 0 or more", loader_of(20), epoch=-1 if odd else 0)
        refuse(r"\(rank 1\): the loader is empty", loader_of(0 if odd else 20))
        refuse("gives rank 1 of 3 no batch", [] if odd else [1], presharded=True)
        generator = iter([torch.ones(1)] * 6)
        if odd:
            list(generator)
        refuse("gives rank 1 of 3 no batch at all.*once only", generator)
        sharded = pl.shard(loader_of(20))
        if odd:
            sharded._memory.next_epoch = 5  # as if this rank alone had begun a pass before
        with pytest.raises(pl.errors.UsageError, match="of this pass is 5 on rank 1, expected 0"):
            list(sharded)
        assert len(list(pl.shard(loader_of(20)))) == 4

    run_ranks(3, battery)
