"""How a batch is made from a request, at once or stage by stage."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from paceline.data.randomness import preserve_random_state, seed_everything
from paceline.data.workers.messages import BatchRequest
from paceline.data.workers.recipe import Recipe, SampleFailed


class Drawn(Dataset):
    epoch = 0

    def __len__(self) -> int:
        return 10

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(())) + 100 * self.epoch


def noisy(sample: float) -> float:
    return sample + random.random() + float(np.random.rand())


def request(indices: Any, epoch: int = 0) -> BatchRequest:
    return BatchRequest(seq=1, loader=0, facts="", epoch=epoch, seed=2**63 + 5, indices=indices)


def test_stages_may_run_in_different_processes() -> None:
    recipe, other = (Recipe(DataLoader(Drawn(), 4), [noisy, noisy]) for _ in range(2))
    whole = recipe.make(request([3, 1]))
    samples = recipe.read(request([3, 1]))
    samples = recipe.apply(0, request([3, 1]), samples)
    torch.rand(5), random.random()  # other code draws in between
    samples = other.apply(1, request([3, 1]), samples)
    assert torch.equal(other.collate(request([3, 1]), samples), whole)
    assert whole.dtype is torch.float64 and whole[0] > 3
    assert not torch.equal(whole, recipe.make(request([3, 2])))


def test_the_epoch_reaches_the_dataset() -> None:
    recipe = Recipe(DataLoader(Drawn(), 4), [])
    assert recipe.make(request([3], epoch=2))[0] > 203
    assert recipe.make(request([3], epoch=0))[0] < 5


def test_without_batches_there_is_one_sample() -> None:
    recipe = Recipe(DataLoader(Drawn(), None), [noisy])
    assert 5 < recipe.make(request(5)) < 8


def test_a_failure_names_the_sample_and_shows_only_the_users_lines() -> None:
    recipe = Recipe(DataLoader([1, 2, "three"], 3), [lambda sample: sample + 1])
    with pytest.raises(
        SampleFailed, match=r"stage 0 \(<lambda>\) of sample 2 raised TypeError"
    ) as caught:
        recipe.make(request([0, 2]))
    assert "/recipe.py" not in str(caught.value) and "test_recipe.py" in str(caught.value)
    with pytest.raises(SampleFailed, match="sample 7 raised IndexError"):
        recipe.make(request([0, 7]))


def test_worker_init_fn_is_called_as_by_a_loader() -> None:
    calls: list[Any] = []

    def init(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        calls.append((number, info.id, info.num_workers, len(info.dataset)))

    Recipe(DataLoader(Drawn(), 4, worker_init_fn=init), []).begin(1, 3)
    assert calls == [(1, 1, 3, 10)] and get_worker_info() is None


def test_random_state_of_a_trainer_is_kept() -> None:
    seed_everything(3)
    expected = (torch.rand(()), random.random(), np.random.rand())
    seed_everything(3)
    with preserve_random_state():
        Recipe(DataLoader(Drawn(), 4), [noisy]).make(request([1, 2]))
    assert (torch.rand(()), random.random(), np.random.rand()) == expected
