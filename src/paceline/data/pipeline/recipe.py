"""How one loader's batches are made: the dataset, the stages, collate.

    seed -> dataset[i] for each i -> stages[0] -> seed again -> stages[1] -> ... -> collate

A STAGE is a function from a sample to a sample. Random numbers are drawn from generators that are
seeded before each stage of each batch, from the batch's place in the epoch (repeatable.py): what is
made does not depend on where one stage ends and the next process begins.

A sample that cannot be made becomes a `Failure`, which says which one, where and why.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as loader_worker

from paceline.data.order import mixed
from paceline.data.pipeline.messages import Order
from paceline.data.plan import length_of
from paceline.data.portable import restored
from paceline.data.repeatable import seed_everything

Stage = Callable[[Any], Any]


class Failure(Exception):
    """What the user's code raised, in words."""


class Recipe:
    """One loader."""

    def __init__(self, loader: DataLoader[Any], stages: Sequence[Stage]) -> None:
        self._loader, self.stages = loader, tuple(stages)
        self._epoch: int | None = None
        self.facts = (
            f"{type(loader.dataset).__name__} of {length_of(loader.dataset)},"
            f" batch_size={loader.batch_size}, {len(self.stages)} stages"
        )

    def begin(self, number: int, count: int) -> None:
        """Be data worker `number` of `count`, as a DataLoader's own workers are told it."""
        if self._loader.worker_init_fn is None:
            return
        info = loader_worker.WorkerInfo(
            id=number, num_workers=count, seed=torch.initial_seed(), dataset=self._loader.dataset
        )
        loader_worker._worker_info = info
        try:
            self._loader.worker_init_fn(number)
        finally:
            # Seen by collate, it would put each batch into a shared memory of torch's own.
            loader_worker._worker_info = None

    def read(self, order: Order) -> Any:
        """Make the samples of a batch (without batching: the one sample), before all stages."""
        self._set_epoch(order.epoch)
        seed_everything(order.seed)
        indices, dataset = restored(order.indices), self._loader.dataset
        if not self._has_batches:
            return self._try(lambda: dataset[indices], f"sample {indices!r:.80}")
        if callable(getattr(dataset, "__getitems__", None)):
            what = f"one of the samples {indices!r:.200}"
            return self._try(lambda: dataset.__getitems__(indices), what)  # type: ignore[attr-defined]
        return [self._try(lambda i=i: dataset[i], f"sample {i!r:.80}") for i in indices]  # type: ignore[misc]

    def apply(self, number: int, order: Order, samples: Any) -> Any:
        """Let one stage work on the samples."""
        stage = self.stages[number]
        if number > 0:
            seed_everything(mixed(order.seed, number))
        indices = restored(order.indices)
        words = f"stage {number} ({getattr(stage, '__name__', type(stage).__name__)}) of sample"
        if not self._has_batches:
            return self._try(lambda: stage(samples), f"{words} {indices!r:.80}")
        return [
            self._try(lambda sample=sample: stage(sample), f"{words} {index!r:.80}")  # type: ignore[misc]
            for index, sample in zip(indices, samples, strict=True)
        ]

    def collate(self, order: Order, samples: Any) -> Any:
        """Make the batch."""
        indices = restored(order.indices)
        return self._try(
            lambda: self._loader.collate_fn(samples), f"collate_fn of {indices!r:.200}"
        )

    def make(self, order: Order) -> Any:
        """Do everything at once."""
        samples = self.read(order)
        for number in range(len(self.stages)):
            samples = self.apply(number, order, samples)
        return self.collate(order, samples)

    @property
    def _has_batches(self) -> bool:
        return self._loader.batch_sampler is not None

    def _set_epoch(self, epoch: int) -> None:
        """A script sets its dataset's epoch in a loop that data workers never enter."""
        if epoch != self._epoch:
            self._epoch = epoch
            if hasattr(self._loader.dataset, "set_epoch"):
                self._loader.dataset.set_epoch(epoch)

    def _try(self, make: Callable[[], Any], what: str) -> Any:
        try:
            return make()
        except Exception as error:  # told to the trainer, which raises it
            within = error.__traceback__
            for _ in range(2):  # ours are of no interest
                within = within.tb_next if within is not None else None
            text = "".join(traceback.format_exception(type(error), error, within))
            said = f"{what} raised {type(error).__name__}: {error}"
            raise Failure(f"{said:.600}\n\nits traceback:\n{text[-8000:]}") from error


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave the generators of this process as they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
