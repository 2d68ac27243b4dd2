"""How one loader's batches are made: the dataset, the stages, collate.

    seed -> dataset[i] for each i -> stages[0] -> seed again -> stages[1] -> ... -> collate

A STAGE is a function from a sample to a sample. Random numbers are drawn from generators that are
seeded before each stage of each batch, from the batch's place in the epoch (randomness.py): what is
made does not depend on where one stage ends and the next process begins.

A sample that cannot be made becomes a `Failure`, which says which one, where and why.

Of a stream, which only comes in sequence, samples are made by their place all the same: a READER
goes through the stream for one trainer and keeps its share of it (data/sources/stream.py). Orders
come about in sequence: what lies between two of them is kept until it is asked for. An order for a
place that was passed, after another data worker has died or in the next pass, makes the reader
begin again. It has random generators of its own, seeded when it begins, so that whoever reads the
stream again finds the same in it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import getitem
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as loader_worker

from paceline.data.randomness import (
    get_random_state,
    kept_random_state,
    mixed,
    seed_everything,
    set_random_state,
)
from paceline.data.sources.samples import samples_in
from paceline.data.sources.stream import Strided
from paceline.data.split.order import restored
from paceline.data.split.plan import length_of
from paceline.data.split.weights import strided_share
from paceline.data.workers.messages import Order

Stage = Callable[[Any], Any]

_KEPT = 1024  # batches that were passed over


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


class Ended(Exception):
    """The stream has no samples for that place any more."""


class Reader:
    """The share of one trainer in one pass over a stream."""

    def __init__(self, loader: DataLoader[Any], order: Order) -> None:
        assert order.stream is not None
        world_size, rank, per_step = order.stream
        self._loader, self._seed = loader, order.seed
        self._strided = Strided(loader.dataset, world_size, rank, per_step)
        self._size = strided_share(world_size, rank, per_step)
        self._next = 0  # place
        self._state: Any
        self._kept: dict[int, Any] = {}
        self._begin()

    def take(self, place: int) -> Any:
        """Return the samples of a batch (without batching: the one sample); raises Ended."""
        with kept_random_state():
            if place < self._next and place not in self._kept:
                self._begin()
            set_random_state(self._state)
            try:
                while self._next <= place:
                    self._kept[self._next] = self._read()
                    self._next += 1
            finally:
                self._state = get_random_state()
        while len(self._kept) > _KEPT:
            del self._kept[min(self._kept)]
        return self._kept.pop(place)

    def _begin(self) -> None:
        with kept_random_state():
            seed_everything(self._seed)
            self._iterator: Iterator[Any] = iter(self._strided)
            self._state = get_random_state()
        self._next = 0
        self._kept = {}

    def _read(self) -> Any:
        if self._loader.batch_size is None:
            for sample in self._iterator:
                return sample
            raise Ended
        samples = list(islice(self._iterator, self._size))
        if not samples or (len(samples) < self._size and self._loader.drop_last):
            raise Ended
        return samples


class Readers:
    """The readers of one loader: one for each trainer, in its newest pass."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._readers: dict[int, tuple[tuple[Any, ...], Reader]] = {}  # by the trainer's rank

    def take(self, order: Order) -> Any:
        """Return the samples of an order; raises Ended, and what the dataset raises."""
        assert order.stream is not None
        rank, key = order.stream[1], (order.epoch, order.seed, order.stream)
        known = self._readers.get(rank)
        if known is None or known[0] != key:
            known = self._readers[rank] = key, Reader(self._loader, order)
        return known[1].take(order.place)
