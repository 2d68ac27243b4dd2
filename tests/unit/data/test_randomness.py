"""Random numbers follow from the position of a batch, and generator states can be restored."""

from __future__ import annotations

import copy
import json
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.randomness import Seeds, save_random_state, seed_step, with_random_state
from paceline.data.sources.samples import ReseedingDataset


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


class Noise(Dataset):
    mark = 0

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return draws()


class Batched(Noise):
    def __getitems__(self, indices: list[int]) -> list[tuple[float, float, float]]:
        return [draws() for _ in indices]


def test_random_numbers_follow_from_the_position() -> None:
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
            DataLoader(ReseedingDataset(dataset), batch_sampler=requests, collate_fn=list)
        )
        assert first == again != second and first[0] != first[1]
    assert ReseedingDataset(Noise())[7, 0] == ReseedingDataset(Noise())[7, 5]


def test_everything_else_is_delegated_to_the_dataset() -> None:
    dataset = Noise()
    wrapped = ReseedingDataset(dataset)
    wrapped.mark = 5
    assert dataset.mark == wrapped.mark == 5
    assert copy.deepcopy(wrapped).mark == 5


class Sampler:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)


def draw(sampler: Sampler) -> list[float]:
    own = torch.rand(1, generator=sampler.generator)
    numpy = [float(np.random.rand()), float(np.random.normal())]
    return [float(torch.rand(1)), random.random(), random.gauss(0, 1), *numpy, float(own)]


def test_restored_generators_draw_the_same_and_others_are_not_changed() -> None:
    sampler, other = Sampler(), Sampler()
    draw(sampler)
    state = json.loads(json.dumps(save_random_state([sampler, None, 7])))
    first = draw(sampler)
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    with with_random_state(state, [other, None]):
        assert draw(other) == first
    here = draw(other)[:-1]
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    assert draw(other)[:-1] == here


def test_without_a_state_nothing_is_restored() -> None:
    torch.manual_seed(1)
    with with_random_state(None, []):
        first = float(torch.rand(1))
    torch.manual_seed(1)
    assert float(torch.rand(1)) == first
