"""Wrong use of pl.shard: the same clear error on every rank, and the job can continue."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

import paceline as pl
from paceline.comm.group import Group
from support import outcomes_of, run_ranks


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


class Spoiled(Dataset):
    """A dataset with one sample that cannot be read."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise OSError(f"picture-{index}.png is truncated")
        return index


class SpoiledStream(IterableDataset):
    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __iter__(self):
        return (Spoiled(self.bad)[i] for i in range(20))


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
        refuse("is the result of pl.shard already", pl.shard(fine))
        refuse("splits batches", [torch.ones(2)], batch="global")
        refuse("splits batches", DataLoader(range(9), batch_size=None), batch="global")
        refuse("index of type float|raised UsageError", DataLoader(range(9), sampler=Odd()))
        if group.size == 3:
            refuse("2 samples for 3 workers, fewer than one each; start at most 2", loader_of(2))
            refuse("global batch of 2 cannot be split among 3", fine, batch="global")
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
            sharded._record.next_epoch = 5  # as if this rank alone had begun a pass before
        with pytest.raises(pl.errors.UsageError, match="of this pass is 5 on rank 1, expected 0"):
            list(sharded)
        assert len(list(pl.shard(loader_of(20)))) == 4

    run_ranks(3, battery)


def test_a_lack_of_data_is_an_error_of_its_own() -> None:
    def battery(group: Group) -> None:
        odd = group.rank == 1

        def refuse(loader: Any, **options: Any) -> None:
            with pytest.raises(pl.errors.DataError):
                list(pl.shard(loader, **options))

        refuse(loader_of(0))  # nothing at all, on all ranks or on one
        refuse(loader_of(0 if odd else 20))
        refuse([])
        refuse(DataLoader(Stream(0), 2))
        refuse(loader_of(2))  # fewer than workers
        refuse(DataLoader(Stream(2), 1))
        refuse([torch.ones(1)] * 2)
        refuse(loader_of(20 + odd))  # not the same length everywhere
        refuse([1, 2, 3] + [4] * odd)
        with pytest.raises(pl.errors.UsageError) as caught:
            pl.shard(loader_of(20), epoch=-1)
        assert not isinstance(caught.value, pl.errors.DataError)

    run_ranks(3, battery)


def test_a_sample_that_raises_is_named() -> None:
    def battery(group: Group) -> None:
        def refuse(pattern: str, loader: Any, **options: Any) -> None:
            with pytest.raises(pl.errors.DataError, match=pattern) as caught:
                list(pl.shard(loader, **options))
            text = "".join(traceback.format_exception(caught.value))
            assert "in __getitem__" in text and "picture-13.png is truncated" in text

        truncated = "OSError: picture-13.png is truncated"
        spoiled = DataLoader(Spoiled(13), 2)
        refuse(f"sample 13 of Spoiled could not be made on rank 0: {truncated}", spoiled)
        with_processes = DataLoader(Spoiled(13), 2, num_workers=2)
        refuse("sample 13 of Spoiled could .* rank 0, DataLoader worker 0", with_processes)
        unbatched = DataLoader(Spoiled(13), batch_size=None)
        refuse("sample 13 of Spoiled could not be made on rank 0", unbatched)
        stream = DataLoader(SpoiledStream(13), 2, num_workers=1)
        refuse("sample 13 of SpoiledStream could .* worker 0 of 1, DataLoader worker 0", stream)
        items = (torch.tensor([Spoiled(13)[i]]) for i in range(20))
        refuse("batch 13 of generator could not be made on rank 0", items)
        refuse("batch 6 of DataLoader .*on rank 0", DataLoader(Spoiled(13), 2), presharded=True)

    run_ranks(1, battery)


def test_one_rank_that_cannot_read_ends_the_others() -> None:
    def battery(group: Group) -> None:
        for batch in pl.shard(DataLoader(Spoiled(13), 2)):
            group.all_reduce(batch.sum())

    errors = [outcome.error for outcome in outcomes_of(2, battery)]
    assert "sample 13 of Spoiled could not be made on rank 0" in str(errors[0])
    assert isinstance(errors[1], pl.errors.PeerLost)
