"""Random numbers that a replacement draws again, to the bit (on_loss="replace").

Before each batch is made, and again before it is given to the script, the generators of torch,
`random` and numpy are seeded from (seed, number of the worker, epoch, place in the pass). So
whatever the dataset and the model draw for a batch follows from its place alone, and not from how
many batches this process has seen before. The script's own seeding is overridden at every batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from paceline.data.order import mixed

_MAKING, _USING, _STEP = 1, 2, 3


def seed_everything(seed: int) -> None:
    """Seed this process's generators."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the one that datasets use


class Seeds:
    """The seeds of one worker's pass."""

    def __init__(self, seed: int, number: int, epoch: int) -> None:
        self._numbers = (seed, number, epoch)

    def of_making(self, batch: int) -> int:
        """For the dataset, in whichever process."""
        return mixed(*self._numbers, batch, _MAKING)

    def before_use(self, batch: int) -> None:
        """For what the script computes with the batch."""
        seed_everything(mixed(*self._numbers, batch, _USING))


def seed_step(seed: int, number: int, step: int) -> None:
    """Seed before a step, for what is drawn without a batch."""
    seed_everything(mixed(seed, number, step, _STEP))


class Reseeding:
    """A dataset that is asked for (seed, indices), and seeds before it makes the samples.
    Everything else is the dataset's own."""

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_dataset", dataset)

    def __getitems__(self, request: tuple[int, Iterable[Any]]) -> Any:
        seed, indices = request
        seed_everything(seed)
        if callable(getattr(self._dataset, "__getitems__", None)):
            return self._dataset.__getitems__(indices)
        return [self._dataset[index] for index in indices]

    def __getitem__(self, request: tuple[int, Any]) -> Any:
        seed, index = request
        seed_everything(seed)
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_dataset"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Reseeding, (self._dataset,)
