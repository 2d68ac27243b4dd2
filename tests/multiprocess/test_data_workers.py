"""pl.shard(..., mode="pipeline"): other processes make the batches, which are the same ones."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import paceline as pl
from paceline.comm.group import Group
from paceline.data.workers import source
from paceline.errors import DataError, UsageError
from paceline.runtime import job
from support import outcomes_of, run_ranks
from support.body import hear, tell
from support.ranks import started


class Noisy(Dataset):
    """Samples with random numbers of all three generators in them."""

    def __init__(self, samples: int = 53) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        import random

        drawn = torch.rand(2) + random.random() + float(np.random.rand())
        return torch.full((2,), float(index)), drawn, index


class Plain(Noisy):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), index


class Numbered(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return ((torch.full((3,), float(index)), index) for index in range(self.samples))


class Point(NamedTuple):
    x: Any
    y: Any


class Odd(Noisy):
    """Samples of variable length, of every kind that can travel."""

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


class Stream(IterableDataset):
    """Samples in sequence, with random numbers in them that depend on all before."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        for index in range(self.samples):
            yield torch.full((2,), float(index)), torch.rand(2) + float(np.random.rand()), index


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def told(thing: Any) -> Any:
    """Turn a batch into something that can be compared, types included."""
    if isinstance(thing, torch.Tensor):
        return str(thing.dtype), list(thing.shape), thing.double().flatten().tolist()
    if isinstance(thing, (np.ndarray, np.generic)):
        return type(thing).__name__, str(thing.dtype), list(thing.shape), thing.tolist()
    if isinstance(thing, dict):
        return {key: told(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [type(thing).__name__, *map(told, thing)]
    return type(thing).__name__, thing


def double(sample: Any) -> Any:
    x, drawn, index = sample
    return x * 2, drawn + torch.rand(2), index


def shift(sample: Any) -> Any:
    x, drawn, index = sample
    return x + 1, drawn + float(np.random.rand()), index


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
        passes += [[told(batch) for batch in loader] for loader in loaders]
        passes.append([told(batch) for batch, _ in zip(loaders[0], range(2), strict=False)])
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
def test_batches_are_the_same_whoever_makes_them(
    made_alone: list[Any], data_workers: Sequence[int], hosts: Any
) -> None:
    assert run_ranks(2, everything, data_workers=data_workers, hosts=hosts) == made_alone


def test_batches_without_chance_are_those_of_mode_shard() -> None:
    def both(_: Group) -> list[Any]:
        loader, other = (DataLoader(Plain(45), 4, shuffle=True) for _ in range(2))
        stream, another = (DataLoader(Numbered(45), 4) for _ in range(2))
        made = pl.shard(loader, seed=7, mode="pipeline")
        read = pl.shard(stream, mode="pipeline")
        found = [[told(b) for b in made], [told(b) for b in pl.shard(other, seed=7)]]
        return [*found, [told(b) for b in read], [told(b) for b in pl.shard(another)]]

    for made, shared, read, strided in run_ranks(2, both, data_workers=(2,)):
        assert made == shared and len(made) == 6
        assert read == strided and len(read) == 6


class Traced(Noisy):
    """Samples that say who made them, and leave a mark in a file."""

    def __init__(self, samples: int, path: str = "") -> None:
        super().__init__(samples)
        self.path = path

    def __getitem__(self, index: int) -> Any:
        if self.path:
            with open(self.path, "ab", buffering=0) as file:
                file.write(b".")
        return index, float(torch.rand(1)), os.getpid()


def test_data_workers_make_all_of_it() -> None:
    def who(_: Group) -> list[int]:
        made = pl.shard(DataLoader(Traced(64), 4), mode="pipeline")
        return [pid for _, _, pids in made for pid in pids.tolist()]

    with started(2, who, data_workers=(2,)) as ranks:
        pids = ranks.pids
        values = ranks.values()
    assert values[2:] == [None, None], "they end in good order, without a result"
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


def test_batches_that_are_kept_stay_what_they_were() -> None:
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
        connections = source._pool_of(job.current()).connections  # type: ignore[union-attr]
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


def test_batches_are_copied_where_memory_cannot_be_shared() -> None:
    def large(_: Group) -> list[float]:
        made = pl.shard(DataLoader(Large(6), 2), mode="pipeline")
        return [value for batch in made for value in batch.mean(1).tolist()]

    with started(1, large, data_workers=(1,)) as ranks:
        assert ranks.values()[0] == list(range(6))
        assert "batches are copied to" in ranks.output(1) and "File too large" in ranks.output(1)


def halting(_: Group, *, is_told: bool) -> list[Any]:
    """Take all batches, but wait for the test after the third."""
    made = pl.shard(DataLoader(Noisy(400), 4, shuffle=True), seed=3, mode="pipeline")
    read = pl.shard(DataLoader(Stream(400), 4), seed=3, mode="pipeline", stages=[double, shift])
    batches = list[Any]()
    for pair in zip(made, read, strict=True):
        batches.append(told(pair))
        if len(batches) == 3 and is_told:
            tell("three")
            hear()
    return batches


def halts(group: Group) -> list[Any]:
    return halting(group, is_told=True)


@pytest.fixture(scope="module")
def made_in_peace() -> list[Any]:
    return run_ranks(2, lambda group: halting(group, is_told=False))


@pytest.mark.parametrize(
    ("data_workers", "victims", "number", "hosts", "words"),
    [
        ((2,), [2], signal.SIGKILL, 1, "data worker 0 "),
        ((2,), [2, 3], signal.SIGKILL, 1, "NONE IS LEFT"),
        ((1, 1), [2], signal.SIGKILL, 1, "NONE IS LEFT"),
        ((2,), [3], signal.SIGKILL, [0, 0, 0, 1], "data worker 1 "),
        ((2,), [2], signal.SIGSTOP, 1, "data worker 0 "),
    ],
    ids=["one", "all", "of a stage", "on another host", "stopped"],
)
def test_a_data_worker_that_dies_costs_nothing_but_time(
    made_in_peace: list[Any],
    data_workers: Sequence[int],
    victims: Sequence[int],
    number: signal.Signals,
    hosts: Any,
    words: str,
) -> None:
    env = {"PACELINE_LIVENESS_S": "3"}  # less, and a starved one counts as stopped as well
    with started(2, halts, data_workers=data_workers, hosts=hosts, env=env) as ranks:
        for rank in range(2):
            ranks.hear(rank)
        for victim in victims:
            ranks.kill(victim, number)
        for rank in range(2):
            ranks.tell(rank, "go on")
        outcomes = ranks.wait(ranks=[0, 1])
        said = "".join(map(ranks.output, range(4)))
    assert [outcome.value for outcome in outcomes] == made_in_peace
    assert words in said, said


class Broken(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 21:
            raise KeyError("no such picture")
        return torch.tensor(index)


def bad_stage(sample: torch.Tensor) -> torch.Tensor:
    if sample == 13:
        raise ZeroDivisionError("thirteen")
    return sample


def bad_collate(samples: list[Any]) -> Any:
    return {"picture": object()}


def raised_by(loader: Any, **options: Any) -> tuple[int, str, str]:
    """Return how many batches came before the error."""
    came = 0
    try:
        for _ in pl.shard(loader, mode="pipeline", **options):
            came += 1
    except (DataError, UsageError) as error:
        return came, type(error).__name__, str(error)
    return came, "", ""


@pytest.mark.parametrize("data_workers", [(), (2,), (1, 1)], ids=["alone", "two", "stages"])
def test_what_the_dataset_raises_is_raised_where_the_batch_is_needed(
    data_workers: Sequence[int],
) -> None:
    def errors(_: Group) -> list[Any]:
        loaders = [DataLoader(Broken(), 4), DataLoader(Plain(), 4, collate_fn=bad_collate)]
        for loader in loaders:
            pl.shard(loader, mode="pipeline")
        third = DataLoader(Numbers(), 4)
        pl.shard(third, mode="pipeline", stages=[bad_stage])
        found = [raised_by(loader) for loader in loaders]
        found.append(raised_by(third, stages=[bad_stage]))
        later = DataLoader(Numbers(), 4)
        return [*found, raised_by(later)]

    (found,) = run_ranks(1, errors, data_workers=data_workers)
    (came, kind, text), collated, staged, later = found
    who = "data worker" if data_workers else "rank 0: "
    assert (came, kind) == (5, "DataError"), "the batches before it are handed out"
    assert "sample 21 raised KeyError: 'no such picture'" in text and who in text
    assert "in __getitem__" in text and "its traceback:" in text and "recipe.py" not in text
    if data_workers:
        assert collated[:2] == (0, "DataError") and "has a builtins.object in it" in collated[2]
    assert staged[:2] == (3, "DataError")
    assert "stage 0 (bad_stage) of sample 13 raised ZeroDivisionError: thirteen" in staged[2]
    assert later == (14, "", ""), "a loader that data workers do not know is read here"


class Numbers(Noisy):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


def test_loaders_that_data_workers_do_not_know_are_mentioned_and_wrong_ones_refused() -> None:
    def two(_: Group) -> tuple[int, str, str]:
        length = 50 if pl.is_data_worker() else 51
        pl.shard(DataLoader(Numbers(), 4), mode="pipeline")
        wrong = DataLoader(Numbers(length), 4)
        pl.shard(wrong, mode="pipeline")
        if pl.is_data_worker():
            assert (pl.rank(), pl.world_size()) == (1, 1)
            assert list(pl.shard(DataLoader(Numbers(), 4))) == [], "this is for trainers"
        made = raised_by(wrong)
        assert len(list(pl.shard(DataLoader(Numbers(), 4), mode="pipeline"))) == 14
        return made

    first, _ = outcomes_of(1, two, data_workers=(1,))
    came, kind, text = first.value
    assert (came, kind) == (0, "UsageError")
    assert "Numbers of 51" in text and "Numbers of 50" in text and "data worker 0" in text
    assert "do not know loader 2" in first.output and "MADE HERE" in first.output


class OwnWay(DataLoader):
    def __iter__(self):
        return iter([1])


def test_what_data_workers_cannot_make_is_refused() -> None:
    def refusals(_: Group) -> list[str]:
        wrong: list[tuple[Any, dict[str, Any]]] = [
            ([1, 2, 3], {}),
            (DataLoader(Stream(3), 2), {"warmup": pl.data_warmup(0.5)}),
            (OwnWay(Noisy(), 2), {}),
            (DataLoader(Noisy(), 2), {"presharded": True}),
            (DataLoader(Noisy(), 2), {"stages": [1]}),
            (DataLoader(Noisy(), 2), {"mode": "pipelines"}),
            (DataLoader(Noisy(), 2), {"mode": "shard", "stages": [double]}),
        ]
        texts = []
        for loader, options in wrong:
            with pytest.raises(UsageError) as caught:
                pl.shard(loader, **{"mode": "pipeline", **options})
            texts.append(str(caught.value))
        return texts

    (texts,) = run_ranks(1, refusals)
    expected = [
        "needs a DataLoader, found a list",
        "a part of the data is drawn by index",
        "OwnWay overrides __iter__",
        "leave one of them out",
        "expected functions of a sample",
        "pipeline (got 'pipelines')",
        "stages=[...] are for mode='pipeline'",
    ]
    for text, words in zip(texts, expected, strict=True):
        assert words in text
