"""Random numbers that another process draws again, to the bit.

Before each batch is made the generators of torch, `random` and numpy are seeded from (seed, number
of the worker, epoch, place in the pass): in the processes of a DataLoader always, so that a run
that is resumed in the middle of an epoch augments its samples as the first would have; in the
process of the script only for on_loss="replace", and there once more before the batch is given to
the script. So whatever the dataset and the model draw for a batch follows from its place alone, and
not from how many batches this process has seen before.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from paceline.data.order import mixed
from paceline.data.samples import Named

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


class Reseeding(Named):
    """A dataset that is asked for (seed, indices), and seeds before it makes the samples."""

    def __init__(self, dataset: Any, who: str = "this rank") -> None:
        super().__init__(dataset, who)

    def __getitems__(self, request: tuple[int, Iterable[Any]]) -> Any:  # type: ignore[override]
        seed, indices = request
        seed_everything(seed)
        return super().__getitems__(indices)

    def __getitem__(self, request: tuple[int, Any]) -> Any:
        seed, index = request
        seed_everything(seed)
        return super().__getitem__(index)
