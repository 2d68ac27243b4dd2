"""A run that resumes from a checkpoint gets the batches that the first run would have got."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resumable_scripts import SAVE_AT, SCRIPTS, Noisy, Recorder, Seeded, over, plain, seed_all
from torch.utils.data import DataLoader

import paceline as pl
from paceline.comm.group import Group
from paceline.data import shard as shard_module
from paceline.data.cursor import progress
from paceline.data.cursor.resumption import data_state, resume_data
from paceline.data.split import order
from paceline.runtime import job
from support import run_ranks


def first_run(group: Group, names: list[str]) -> dict[str, Any]:
    """Run the scripts from beginning to end; return what they saw and what they saved."""
    found = {}
    order.CHUNK, progress._MANY = 10, 2  # many chunks; loaders are forgotten soon
    for name in names:
        progress._by_job.clear()  # each script as if in a new process
        seed_all(1000 + group.rank)
        recorder = Recorder(SAVE_AT.get(name, 10))
        SCRIPTS[name](recorder)
        found[name] = recorder.seen, recorder.saved
    return found


def second_run(group: Group, path: str) -> dict[str, Any]:
    """Run the scripts again, each from its checkpoint."""
    found = {}
    saved: dict[str, list[Any]] = torch.load(path, weights_only=False)
    order.CHUNK, progress._MANY = 10, 2  # many chunks; loaders are forgotten soon
    for name, states in saved.items():
        progress._by_job.clear()
        seed_all(1000 if group.rank == 0 else 5)
        recorder = Recorder(None, SAVE_AT.get(name, 10))
        said = resume_data(job.current(), [state for state, *_ in states], is_lockstep=True)
        if group.size == len(states):
            _, of_torch, of_random, of_numpy = states[group.rank]
            torch.set_rng_state(of_torch)
            random.setstate(of_random)
            np.random.set_state(of_numpy)
        SCRIPTS[name](recorder)
        found[name] = recorder.seen, said
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What two workers saw, and what they saved."""
    return run_ranks(2, first_run, list(SCRIPTS), timeout_s=100)


def resumed(
    workers: int, ranks: list[dict[str, Any]], names: list[str], directory: Path
) -> list[dict[str, Any]]:
    path = str(directory / "states")
    torch.save({name: [rank[name][1] for rank in ranks] for name in names}, path)
    return run_ranks(workers, second_run, path, timeout_s=100)


def after_save(seen: list[Any]) -> list[Any]:
    return seen[seen.index("saved") + 1 :]


def test_the_same_workers_get_the_same_batches(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    names = [name for name in SCRIPTS if name != "by speed"]  # speeds are measured again
    again = resumed(2, ranks, names, tmp_path)
    for name in names:
        for rank in range(2):
            expected = after_save(ranks[rank][name][0])
            seen, logged = again[rank][name]
            assert expected and seen == expected, name
            assert logged == []


NOT_SPLIT = ("sampler", "presharded", "steps")  # drawn with repeats, or not by epochs


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_gets_the_rest(
    ranks: list[dict[str, Any]], workers: int, tmp_path: Path
) -> None:
    names = [name for name in SCRIPTS if name != "sampler"]
    again = resumed(workers, ranks, names, tmp_path)
    for name in names:
        where = "between two epochs" if name == "rounds" else "in the middle of epoch"
        assert again[0][name][1][0].startswith(f"data: 2 -> {workers} workers")
        assert where in again[0][name][1][0]
        if name in NOT_SPLIT:
            continue
        whole = counted(rank[name][0] for rank in ranks)
        had = counted(rank[name][0][: rank[name][0].index("saved")] for rank in ranks)
        got = counted(rank[name][0] for rank in again)
        for epoch in whole:
            together = had.get(epoch, Counter()) + got.get(epoch, Counter())
            if name == "evaluation" and isinstance(epoch, str):
                assert set(together) == set(range(10)) and len(set(together.values())) == 1
                continue  # so many steps, so many evaluations
            assert max(together.values()) == max(whole[epoch].values()), (name, epoch)
            if name != "dropped":
                assert together == whole[epoch], (name, epoch)


def counted(ranks: Any) -> dict[Any, Counter[float]]:
    """Return how often all workers saw each sample in each epoch."""
    found: dict[Any, Counter[float]] = {}
    for seen in ranks:
        for epoch, batches, weight in (entry for entry in seen if entry != "saved"):
            if weight == 0.0:
                continue
            rows = batches if isinstance(epoch, str) else batches[0]
            samples = [row[0] if isinstance(row, list) else row for row in rows]
            found.setdefault(epoch, Counter()).update(samples)
    return found


class Thirds:
    """A source whose batches are only counted: each worker reads a part of its own."""

    kind = "thirds"
    facts: dict[str, Any] = {}
    length = None

    def batches(self, data_pass: Any) -> Iterator[Any]:
        return data_pass.track(self._made(data_pass))  # type: ignore[no-any-return]

    def _made(self, data_pass: Any) -> Iterator[Any]:
        for number in range(data_pass.group.rank, 30, data_pass.group.size):
            data_pass.announcer.set(1.0)
            yield torch.tensor([float(number), float(torch.rand(()))])[None]


def run_thirds(group: Group, path: str | None) -> Any:
    shard_module.source_of = lambda *_, **__: Thirds()
    seed_all(group.rank)
    seen, said, saved = list[Any](), list[str](), None
    if path is not None:
        states = torch.load(path)
        said = resume_data(job.current(), [state for state, _ in states], is_lockstep=True)
        if group.size == len(states):
            torch.set_rng_state(states[group.rank][1])
    for epoch in range(2):
        for batch in pl.shard([0], epoch=epoch):
            seen.append([epoch, *batch[0].tolist()])
            if path is None and len(seen) == 20:
                saved = json.loads(json.dumps(data_state(job.current()))), torch.get_rng_state()
    return seen, saved, said


def test_a_pass_that_only_counts_batches_skips_the_used_ones(tmp_path: Path) -> None:
    ranks = run_ranks(2, run_thirds, None)
    path = str(tmp_path / "states")
    torch.save([saved for _, saved, _ in ranks], path)
    again = run_ranks(2, run_thirds, path)
    assert [seen for seen, _, _ in again] == [seen[20:] for seen, _, _ in ranks]
    alone = run_ranks(1, run_thirds, path)
    assert [[epoch, number] for epoch, number, _ in alone[0][0]] == [[1, n] for n in range(30)]
    assert "no sample is left out, and at most 10 samples are repeated" in alone[0][2][0]


def run_apart(group: Group, path: str | None, samples: int, kind: str) -> Any:
    """Workers that do not wait for each other: one is three batches ahead of the other."""
    sampler = {"sampler": list(range(samples))[::-1]} if kind == "sampler" else {"shuffle": True}
    loader, seen, saved = DataLoader(Seeded(samples), 3, **sampler), list[Any](), None
    said: list[str] = []
    sharded = pl.shard(loader, epoch=0, seed=4)  # before this run is known to be resumed
    if path is not None:
        said = resume_data(job.current(), torch.load(path), is_lockstep=False)
    for batch in sharded:
        seen += [row for (row,) in plain(batch)] if job.current().contribution.weight else []
        if path is None and len(seen) == (15 if group.rank == 0 else 6):
            saved = json.loads(json.dumps(data_state(job.current())))
            break
    return seen, saved, said


@pytest.mark.parametrize("kind", ["shuffled", "sampler"])
def test_free_running_workers_continue_where_each_was(kind: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, run_apart, None, 41, kind)
    path = str(tmp_path / "states")
    torch.save([state for _, state, _ in ranks], path)
    had = Counter(x for seen, _, _ in ranks for x in seen)
    again = run_ranks(2, run_apart, path, 41, kind)
    together = had + Counter(x for seen, _, _ in again for x in seen)
    assert together == Counter(map(float, range(41))) and again[0][2] == []
    alone = run_ranks(1, run_apart, path, 41, kind)  # from the position of the slower worker
    together = had + Counter(alone[0][0])
    assert set(together) == set(map(float, range(41))) and max(together.values()) == 2
    twice = sum(count == 2 for count in together.values())
    assert twice == 9 and "at most 9 samples are repeated" in alone[0][2][1]


def refuse_other_data(group: Group, path: str) -> None:
    """Resume with other data than that of the checkpoint."""
    state = torch.load(path)
    wrong = {
        "the length of the dataset is 40, expected 41 as in the checkpoint": lambda: over(
            lambda: DataLoader(Noisy(40), 3, shuffle=True)
        ),
        "batch_size is 4, expected 3": lambda: over(lambda: DataLoader(Noisy(41), 4, shuffle=True)),
        "the sampler is 'SequentialSampler', expected 'RandomSampler'": lambda: over(
            lambda: DataLoader(Noisy(41), 3)
        ),
        "seed is '5', expected None": lambda: over(
            lambda: DataLoader(Noisy(41), 3, shuffle=True), seed=5
        ),
        "the kind of loader is 'items', expected 'indexed'": lambda: over(lambda: Forever()),
    }
    for text, make in wrong.items():
        progress._by_job.clear()
        resume_data(job.current(), state, is_lockstep=True)
        with pytest.raises(pl.errors.DataError, match=text):
            make()(Recorder(None))
    for states, text in (
        ([], "of 0 workers"),
        (state[:1], "saved by 2 workers, but has the data states of 1"),
        ([{**one, "format": 9} for one in state], "has format 9, expected 1"),
    ):
        with pytest.raises(pl.errors.DataError, match=text):
            resume_data(job.current(), states, is_lockstep=True)


class Forever:
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(1)


def test_other_data_is_refused(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    path = str(tmp_path / "states")
    torch.save([rank["shuffled"][1][0] for rank in ranks], path)
    run_ranks(2, refuse_other_data, path)
