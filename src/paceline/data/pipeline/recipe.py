"""How one loader's batches are made: the dataset, the stages, collate.

    seed -> dataset[i] for each i -> stages[0] -> seed again -> stages[1] -> ... -> collate

A STAGE is a function from a sample to a sample. Random numbers are drawn from generators that are
seeded before each stage of each batch, from the batch's place in the epoch (repeatable.py): what is
made does not depend on where one stage ends and the next process begins.

A sample that cannot be made becomes a `Failure`, which says which one, where and why.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as loader_worker

from paceline.data.order import mixed
from paceline.data.pipeline.messages import Order
from paceline.data.pipeline.streams import Ended, Readers
from paceline.data.plan import length_of
from paceline.data.portable import restored
from paceline.data.repeatable import seed_everything
from paceline.data.stream import samples_in

Stage = Callable[[Any], Any]


class Failure(Exception):
    """What the user's code raised, in words."""


class Recipe:
    """One loader."""

    def __init__(self, loader: DataLoader[Any], stages: Sequence[Stage]) -> None:
        self._loader, self.stages = loader, tuple(stages)
        self._readers = Readers(loader)
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
        """Make the samples of a batch (without batching: the one sample), before all stages. Raises
        Failure, and Ended behind the end of a stream."""
        self._set_epoch(order.epoch)
        if order.stream is not None:
            samples = self._try(lambda: self._readers.take(order), lambda: _name_of(order))
            seed_everything(mixed(order.seed, order.place))
            return samples
        seed_everything(order.seed)
        indices, dataset = restored(order.indices), self._loader.dataset
        if not self._has_batches:
            return self._try(lambda: dataset[indices], lambda: _name_of(order))
        if callable(getattr(dataset, "__getitems__", None)):
            take: Callable[[Any], Any] = dataset.__getitems__  # type: ignore[attr-defined]
            return self._try(lambda: take(indices), lambda: f"one of the {_name_of(order)}")
        return [
            self._try(partial(getitem, dataset, index), partial(_name_of, order, place))
            for place, index in enumerate(indices)
        ]

    def apply(self, number: int, order: Order, samples: Any) -> Any:
        """Let one stage work on the samples."""
        stage = self.stages[number]
        if number > 0:
            seed_everything(mixed(order.seed, number, order.place))

        def name(place: int | None) -> str:
            called = getattr(stage, "__name__", type(stage).__name__)
            return f"stage {number} ({called}) of {_name_of(order, place)}"

        if not self._has_batches:
            return self._try(lambda: stage(samples), lambda: name(None))
        return [
            self._try(partial(stage, sample), partial(name, place))
            for place, sample in enumerate(samples)
        ]

    def collate(self, order: Order, samples: Any) -> Any:
        """Make the batch; of a stream, with the number of samples in it."""
        collate = self._loader.collate_fn
        batch = self._try(lambda: collate(samples), lambda: f"collate_fn of {_name_of(order)}")
        if order.stream is None:
            return batch
        return len(samples) if self._has_batches else samples_in(batch), batch

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

    def _try(self, make: Callable[[], Any], what: Callable[[], str]) -> Any:
        try:
            return make()
        except Ended:
            raise
        except Exception as error:  # told to the trainer, which raises it
            within = error.__traceback__
            while within is not None and within.tb_frame.f_code.co_filename == __file__:
                within = within.tb_next  # ours are of no interest
            text = "".join(traceback.format_exception(type(error), error, within))
            said = f"{what()} raised {type(error).__name__}: {error}"
            raise Failure(f"{said:.600}\n\nits traceback:\n{text[-8000:]}") from error


def _name_of(order: Order, place: int | None = None) -> str:
    """Name a sample by its index, or what is known of it; without a place all of a batch."""
    if order.stream is not None:
        batch = f"batch {order.place} of rank {order.stream[1]} in the stream"
        return batch if place is None else f"sample {place} of {batch}"
    indices = restored(order.indices)
    if place is not None:
        return f"sample {indices[place]!r:.80}"
    return f"{'samples' if isinstance(indices, list) else 'sample'} {indices!r:.200}"
