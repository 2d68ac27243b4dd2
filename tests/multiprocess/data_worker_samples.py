"""Datasets and stages for the tests of data workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Noisy(Dataset):
    """Samples with random numbers of all three generators in them."""

    def __init__(self, samples: int = 53) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand(2) + random.random() + float(np.random.rand())
        return torch.full((2,), float(index)), drawn, index


class Plain(Noisy):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), index


class Stream(IterableDataset):
    """Samples in sequence, with random numbers in them that depend on all before."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        for index in range(self.samples):
            yield torch.full((2,), float(index)), torch.rand(2) + float(np.random.rand()), index


def comparable(thing: Any) -> Any:
    """Return a batch as something that can be compared, types included."""
    if isinstance(thing, torch.Tensor):
        return str(thing.dtype), list(thing.shape), thing.double().flatten().tolist()
    if isinstance(thing, (np.ndarray, np.generic)):
        return type(thing).__name__, str(thing.dtype), list(thing.shape), thing.tolist()
    if isinstance(thing, dict):
        return {key: comparable(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [type(thing).__name__, *map(comparable, thing)]
    return type(thing).__name__, thing


def double(sample: Any) -> Any:
    x, drawn, index = sample
    return x * 2, drawn + torch.rand(2), index


def shift(sample: Any) -> Any:
    x, drawn, index = sample
    return x + 1, drawn + float(np.random.rand()), index
