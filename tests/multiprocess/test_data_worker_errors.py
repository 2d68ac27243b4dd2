"""Errors of datasets, stages and loaders in data workers, and loaders that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from data_worker_samples import Noisy, Plain, Stream, double
from torch.utils.data import DataLoader

import paceline as pl
from paceline.comm.group import Group
from paceline.errors import DataError, UsageError
from support import outcomes_of, run_ranks


class Numbers(Noisy):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


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
def test_an_error_of_the_dataset_is_raised_when_its_batch_is_due(
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
    where = "data worker" if data_workers else "rank 0: "
    assert (came, kind) == (5, "DataError"), "the batches before it are handed out"
    assert "sample 21 raised KeyError: 'no such picture'" in text and where in text
    assert "in __getitem__" in text and "its traceback:" in text and "recipe.py" not in text
    if data_workers:
        assert collated[:2] == (0, "DataError") and "has a builtins.object in it" in collated[2]
    assert staged[:2] == (3, "DataError")
    assert "stage 0 (bad_stage) of sample 13 raised ZeroDivisionError: thirteen" in staged[2]
    assert later == (14, "", ""), "a loader that data workers do not know is read here"


def test_unknown_loaders_are_logged_and_different_ones_refused() -> None:
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


def test_loaders_that_data_workers_cannot_serve_are_refused() -> None:
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
    for text, part in zip(texts, expected, strict=True):
        assert part in text
