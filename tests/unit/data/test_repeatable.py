"""Random numbers follow from the place of a batch alone."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.randomness import Seeds, seed_step
from paceline.data.sources.samples import Reseeding


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


class Noise(Dataset):
    mark = 0

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return draws()


class Batched(Noise):
    def __getitems__(self, indices: list[int]) -> list[tuple[float, float, float]]:
        return [draws() for _ in indices]


def test_what_is_drawn_follows_from_the_place() -> None:
    seeds, other = Seeds(1, 2, 3), Seeds(1, 3, 3)
    found = []
    for these, batch in [(seeds, 0), (seeds, 1), (other, 0), (seeds, 0)]:
        these.before_use(batch)
        found.append(draws())
    assert found[0] == found[3] and len(set(found)) == 3
    seed_step(1, 2, 3)
    first = draws()
    seed_step(1, 2, 3)
    assert draws() == first not in found


def test_a_dataset_seeds_before_each_batch() -> None:
    for dataset in (Noise(), Batched()):
        requests = [(7, [0, 1]), (8, [0, 1]), (7, [0, 1])]
        first, second, again = list(
            DataLoader(Reseeding(dataset), batch_sampler=requests, collate_fn=list)
        )
        assert first == again != second and first[0] != first[1]
    assert Reseeding(Noise())[7, 0] == Reseeding(Noise())[7, 5]


def test_everything_else_is_the_datasets_own() -> None:
    dataset = Noise()
    wrapped = Reseeding(dataset)
    wrapped.mark = 5
    assert dataset.mark == wrapped.mark == 5
    assert copy.deepcopy(wrapped).mark == 5
