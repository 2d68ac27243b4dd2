"""pl.shard and DataLoader workers: settings are kept, processes survive epochs, seeds differ."""

from __future__ import annotations

import gc
import multiprocessing
import os
import weakref
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import paceline as pl
from paceline.comm.group import Group
from paceline.data.split import order
from support import run_ranks


class Traced(Dataset):
    """Samples that say in which process they were made, and with which random number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.mark = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, int, int, int]:
        return index, os.getpid(), int(torch.randint(1 << 40, ())), self.mark


def set_mark(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = 100 + worker


class Shouting(DataLoader):
    """A loader of the user's own class."""

    def __iter__(self):
        for batch in super().__iter__():
            yield [*batch, "!"]


class Uneven:
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self):
        return iter(range(self.samples))


def samples_of(batches: list[Any]) -> list[int]:
    return [int(x) for batch in batches for x in batch[0]]


@pytest.mark.parametrize(("world_size", "start"), [(1, "spawn"), (1, "fork"), (2, "fork")])
def test_loaders_with_workers(world_size: int, start: str) -> None:
    def battery(group: Group) -> dict[str, Any]:
        loader = DataLoader(
            Traced(50),
            4,
            shuffle=True,
            num_workers=2,
            persistent_workers=True,
            prefetch_factor=3,
            timeout=60,
            worker_init_fn=set_mark,
            multiprocessing_context=start,
        )
        epochs = [list(pl.shard(loader, epoch=e, seed=1)) for e in range(3)]
        pids = [{int(p) for batch in batches for p in batch[1]} for batches in epochs]
        assert pids[0] == pids[1] == pids[2] and len(pids[0]) == 2  # the same two processes
        marks = {int(m) for batches in epochs for batch in batches for m in batch[3]}
        assert marks == {100, 101}
        for batch in pl.shard(loader, epoch=3):  # leaving early does no harm to the next pass
            assert len(batch[0]) == 4
            break
        again = list(pl.shard(loader, epoch=1, seed=1))
        assert samples_of(again) == samples_of(epochs[1])
        assert {int(p) for batch in again for p in batch[1]} == pids[0]
        group.barrier()
        return {"epochs": [samples_of(e) for e in epochs], "draws": epochs[0][0][2].tolist()}

    ranks = run_ranks(world_size, battery, timeout_s=100)
    for epoch in range(3):
        together = chain.from_iterable(rank["epochs"][epoch] for rank in ranks)
        assert sorted(set(together)) == list(range(50))
    if world_size == 2:
        assert ranks[0]["draws"] != ranks[1]["draws"]  # augmentation differs between ranks


def test_workers_that_end_with_each_pass_and_loaders_that_go_away() -> None:
    def battery(group: Group) -> None:
        loader = DataLoader(Traced(20), 2, num_workers=2)
        draws = []
        for _ in range(2):
            batches = list(pl.shard(loader, seed=3))
            assert sorted(samples_of(batches)) == samples_of(batches)
            draws.append([int(d) for batch in batches for d in batch[2]])
            assert not multiprocessing.active_children()
        assert draws[0] != draws[1]  # augmentation differs between epochs, and can be repeated
        again = list(pl.shard(loader, epoch=0, seed=3))
        assert [int(d) for batch in again for d in batch[2]] == draws[0]
        loader.num_workers = 0  # what may be assigned has its effect
        loader.collate_fn = len
        assert set(pl.shard(loader)) == {2}
        assert loader.in_order
        loader.in_order = False
        assert set(pl.shard(loader)) == {2}
        own = Shouting(range(8), 2)
        assert all(batch[-1] == "!" for batch in pl.shard(own))
        gone = DataLoader(Traced(20), 2, num_workers=1, persistent_workers=True)
        assert len(list(pl.shard(gone))) == 5
        assert len(multiprocessing.active_children()) == 1
        watch = weakref.ref(gone)
        del gone
        gc.collect()
        assert watch() is None and not multiprocessing.active_children()

    run_ranks(2, battery)


def test_ranks_may_look_ahead_differently_while_rank_0_tells_the_order() -> None:
    def battery(group: Group) -> None:
        order.CHUNK = 4  # less than what rank 1's workers ask for ahead of time
        ahead = {"num_workers": 2, "prefetch_factor": 4} if group.rank == 1 else {}
        loader = DataLoader(range(102), 2, sampler=Uneven(102), **ahead)
        seen = []
        for batch in pl.shard(loader):
            # The step of all ranks: no rank gets ahead of another.
            group.all_reduce(torch.ones(1))
            seen += batch.tolist()
        everything = [x for part in group.all_gather(torch.tensor([sum(seen)])) for x in part]
        assert sum(everything) == sum(range(102))
        # Several loaders side by side, one of them with workers.
        plain = DataLoader(range(60), 1, sampler=Uneven(60))
        for (a, b), _ in zip(zip(pl.shard(loader), pl.shard(plain)), range(10)):  # noqa: B905
            assert len(a) == 2 and len(b) == 1
            group.barrier()

    run_ranks(2, battery)
