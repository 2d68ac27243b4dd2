"""pl.shard(..., mode="pipeline"): other processes make the batches, which are the same ones."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from data_worker_samples import Noisy, Plain, Stream, comparable, double, shift
from torch.utils.data import DataLoader, IterableDataset

import paceline as pl
from paceline.comm.group import Group
from paceline.data.workers import source
from paceline.runtime import job
from support import run_ranks
from support.ranks import started


class Numbered(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return ((torch.full((3,), float(index)), index) for index in range(self.samples))


class Point(NamedTuple):
    x: Any
    y: Any


class Odd(Noisy):
    """Samples of variable length, of every type that can be sent."""

    def __getitem__(self, index: int) -> Any:
        return {
            "text": f"sample {index}",
            "long": torch.arange(index * 37 % 900, dtype=torch.int16),
            "array": np.full((2, index % 3), index, dtype=np.float64),
            "scalar": np.float32(index),
            "none": None,
            7: (True, 1.5, b"bytes", [index]),
            "point": Point(torch.tensor(index % 2 == 0), torch.randn(3).to(torch.bfloat16)),
            "strided": torch.arange(12).view(3, 4).t(),
        }


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def everything(_: Group) -> list[Any]:
    """Pass over several loaders, twice, one pass being left in the middle."""
    loaders = [
        pl.shard(DataLoader(Noisy(), 4, shuffle=True), seed=5, mode="pipeline"),
        pl.shard(DataLoader(Odd(31), 5, collate_fn=as_they_are), mode="pipeline", pad=False),
        pl.shard(DataLoader(Noisy(), None), seed=1, mode="pipeline"),
        pl.shard(
            DataLoader(Noisy(40), 8, sampler=list(range(39, -1, -2))),
            seed=9,
            batch="global",
            mode="pipeline",
            stages=[double, shift],
        ),
        pl.shard(DataLoader(Stream(43), 4), seed=2, mode="pipeline"),
        pl.shard(DataLoader(Stream(43), 3), seed=2, mode="pipeline", pad=False, stages=[double]),
        pl.shard(DataLoader(Stream(9), None), mode="pipeline", stages=[double, shift], pad=False),
    ]
    lengths = [len(loader) for loader in loaders[:4]]
    passes = list[Any](lengths)
    for _ in range(2):
        passes += [[comparable(batch) for batch in loader] for loader in loaders]
        passes.append([comparable(batch) for batch, _ in zip(loaders[0], range(2), strict=False)])
    passes.append(torch.rand(1).item() if torch.initial_seed() == 0 else None)
    return passes


@pytest.fixture(scope="module")
def made_alone() -> list[Any]:
    return run_ranks(2, everything)


@pytest.mark.parametrize(
    ("data_workers", "hosts"),
    [((1,), 1), ((3,), 1), ((2, 1), 1), ((1, 1), [0, 0, 1, 1]), ((2,), [0, 1, 0, 1])],
    ids=["one", "three", "stages", "another host", "two hosts"],
)
def test_batches_do_not_depend_on_the_data_workers(
    made_alone: list[Any], data_workers: Sequence[int], hosts: Any
) -> None:
    assert run_ranks(2, everything, data_workers=data_workers, hosts=hosts) == made_alone


def test_batches_without_chance_are_those_of_mode_shard() -> None:
    def both(_: Group) -> list[Any]:
        loader, other = (DataLoader(Plain(45), 4, shuffle=True) for _ in range(2))
        stream, another = (DataLoader(Numbered(45), 4) for _ in range(2))
        made = pl.shard(loader, seed=7, mode="pipeline")
        read = pl.shard(stream, mode="pipeline")
        found = [[comparable(b) for b in made], [comparable(b) for b in pl.shard(other, seed=7)]]
        return [*found, [comparable(b) for b in read], [comparable(b) for b in pl.shard(another)]]

    for made, shared, read, strided in run_ranks(2, both, data_workers=(2,)):
        assert made == shared and len(made) == 6
        assert read == strided and len(read) == 6


class Traced(Noisy):
    """Samples with the pid of the process that made them; each leaves a mark in a file."""

    def __init__(self, samples: int, path: str = "") -> None:
        super().__init__(samples)
        self.path = path

    def __getitem__(self, index: int) -> Any:
        if self.path:
            with open(self.path, "ab", buffering=0) as file:
                file.write(b".")
        return index, float(torch.rand(1)), os.getpid()


def test_data_workers_make_all_of_it() -> None:
    def pids_of(_: Group) -> list[int]:
        made = pl.shard(DataLoader(Traced(64), 4), mode="pipeline")
        return [pid for _, _, pids in made for pid in pids.tolist()]

    with started(2, pids_of, data_workers=(2,)) as ranks:
        pids = ranks.pids
        values = ranks.values()
    assert values[2:] == [None, None], "data workers exit cleanly, without a result"
    assert {pid for value in values[:2] for pid in value} == set(pids[2:])


def wait_for_size(path: str, size: int) -> int:
    deadline_s = time.monotonic() + 30
    while (found := os.path.getsize(path)) < size and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return found


def test_data_workers_are_never_further_ahead_than_allowed(tmp_path: Path) -> None:
    path = str(tmp_path / "made")
    Path(path).touch()

    def slowly(_: Group) -> list[int]:
        # 3 ahead for each of 2 data workers, and the one that is needed next.
        loader = DataLoader(Traced(100, path), 1, num_workers=1, prefetch_factor=3)
        made, sizes = iter(pl.shard(loader, mode="pipeline")), list[int]()
        for taken in range(1, 4):
            next(made)
            wait_for_size(path, taken + 6)
            time.sleep(0.1)  # for one that would make more than that
            sizes.append(wait_for_size(path, taken + 6))
        return sizes

    (sizes,) = run_ranks(1, slowly, data_workers=(2,))
    assert sizes == [7, 8, 9]


def test_batches_that_the_script_keeps_do_not_change() -> None:
    def keep(_: Group) -> tuple[bool, bool, int]:
        loader = DataLoader(Traced(400), 4)
        made = pl.shard(loader, mode="pipeline")
        kept = list(made)
        copies = [[part.clone() for part in batch] for batch in kept]
        indices = [index for batch in kept for index in batch[0].tolist()]
        views = [batch[1][1:] for batch in kept]
        values = [view.tolist() for view in views]
        del kept
        gc.collect()
        for batch in made:  # another pass, in whatever memory is free
            batch[0].fill_(-1)
        is_same = all(
            view.tolist() == value == copy[1][1:].tolist()
            for view, value, copy in zip(views, values, copies, strict=True)
        )
        connections = source._pool_of(job.current())._connections  # type: ignore[union-attr]
        return indices == list(range(400)), is_same, max(one.held for one in connections)

    ((is_complete, is_same, held),) = run_ranks(1, keep, data_workers=(1,))
    assert is_complete and is_same
    assert held < 20, "memory of the data worker is not held without bound"


class Large(Noisy):
    """Samples for which their process has no memory to share."""

    def __getitem__(self, index: int) -> Any:
        if pl.is_data_worker():
            limits = (64 << 10, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return torch.full((1 << 18,), float(index))


def test_batches_are_copied_if_memory_cannot_be_shared() -> None:
    def large(_: Group) -> list[float]:
        made = pl.shard(DataLoader(Large(6), 2), mode="pipeline")
        return [value for batch in made for value in batch.mean(1).tolist()]

    with started(1, large, data_workers=(1,)) as ranks:
        assert ranks.values()[0] == list(range(6))
        assert "batches are copied to" in ranks.output(1) and "File too large" in ranks.output(1)
