"""How the batches of one loader are made: the dataset, the stages, collate.

    seed -> dataset[i] for each i -> stages[0] -> seed again -> stages[1] -> ... -> collate

A STAGE is a function from a sample to a sample. The random generators are seeded before each stage
of each batch, from the batch's position in the epoch (randomness.py). So the result does not depend
on which process runs which stage.

A sample that cannot be made raises `SampleFailed`, which names the sample, the place and the cause.

Samples of a stream are requested by batch number as well. A READER iterates the stream for one
trainer and keeps its share of it (data/sources/stream.py). Requests arrive roughly in sequence:
batches in between are kept until they are requested. A request for an earlier batch, after another
data worker has died or in the next pass, makes the reader start again. It has random states of its
own, seeded when it starts, so that every reader of the stream gets the same samples.
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
    mix_seeds,
    preserve_random_state,
    seed_everything,
    set_random_state,
)
from paceline.data.sources.samples import samples_in
from paceline.data.sources.stream import StridedDataset
from paceline.data.split.plan import length_of
from paceline.data.split.weights import strided_share
from paceline.data.workers.messages import BatchRequest
from paceline.state.serializer import unflatten_state

Stage = Callable[[Any], Any]

_KEPT = 1024  # batches that were read and not requested yet


class SampleFailed(Exception):
    """The user's code raised an exception; has its text."""


class Recipe:
    """How to make the batches of one loader."""

    def __init__(self, loader: DataLoader[Any], stages: Sequence[Stage]) -> None:
        self._loader, self.stages = loader, tuple(stages)
        self._readers = Readers(loader)
        self._epoch: int | None = None
        self.facts = (
            f"{type(loader.dataset).__name__} of {length_of(loader.dataset)},"
            f" batch_size={loader.batch_size}, {len(self.stages)} stages"
        )

    def begin(self, number: int, count: int) -> None:
        """Call worker_init_fn as in the worker `number` of `count` of a DataLoader."""
        if self._loader.worker_init_fn is None:
            return
        info = loader_worker.WorkerInfo(
            id=number, num_workers=count, seed=torch.initial_seed(), dataset=self._loader.dataset
        )
        loader_worker._worker_info = info
        try:
            self._loader.worker_init_fn(number)
        finally:
            # If collate saw it, it would put each batch into shared memory of torch.
            loader_worker._worker_info = None

    def read(self, request: BatchRequest) -> Any:
        """Return the samples of a batch (without batching: the one sample), before all stages.
        Raises SampleFailed, and StreamEnded after the end of a stream."""
        self._set_epoch(request.epoch)
        if request.stream is not None:
            samples = self._try(lambda: self._readers.take(request), lambda: _name_of(request))
            seed_everything(mix_seeds(request.seed, request.place))
            return samples
        seed_everything(request.seed)
        indices, dataset = unflatten_state(request.indices, ()), self._loader.dataset
        if not self._has_batches:
            return self._try(lambda: dataset[indices], lambda: _name_of(request))
        if callable(getattr(dataset, "__getitems__", None)):
            take: Callable[[Any], Any] = dataset.__getitems__  # type: ignore[attr-defined]
            return self._try(lambda: take(indices), lambda: f"one of the {_name_of(request)}")
        return [
            self._try(partial(getitem, dataset, index), partial(_name_of, request, place))
            for place, index in enumerate(indices)
        ]

    def apply(self, number: int, request: BatchRequest, samples: Any) -> Any:
        """Apply one stage to the samples."""
        stage = self.stages[number]
        if number > 0:
            seed_everything(mix_seeds(request.seed, number, request.place))

        def name(place: int | None) -> str:
            called = getattr(stage, "__name__", type(stage).__name__)
            return f"stage {number} ({called}) of {_name_of(request, place)}"

        if not self._has_batches:
            return self._try(lambda: stage(samples), lambda: name(None))
        return [
            self._try(partial(stage, sample), partial(name, place))
            for place, sample in enumerate(samples)
        ]

    def collate(self, request: BatchRequest, samples: Any) -> Any:
        """Return the batch; of a stream, with the number of samples in it."""
        collate = self._loader.collate_fn
        batch = self._try(lambda: collate(samples), lambda: f"collate_fn of {_name_of(request)}")
        if request.stream is None:
            return batch
        return len(samples) if self._has_batches else samples_in(batch), batch

    def make(self, request: BatchRequest) -> Any:
        """Return the batch of a request: read, apply all stages, collate."""
        samples = self.read(request)
        for number in range(len(self.stages)):
            samples = self.apply(number, request, samples)
        return self.collate(request, samples)

    @property
    def _has_batches(self) -> bool:
        return self._loader.batch_sampler is not None

    def _set_epoch(self, epoch: int) -> None:
        """Call set_epoch of the dataset: scripts do so in a loop that data workers never enter."""
        if epoch != self._epoch:
            self._epoch = epoch
            if hasattr(self._loader.dataset, "set_epoch"):
                self._loader.dataset.set_epoch(epoch)

    def _try(self, make: Callable[[], Any], what: Callable[[], str]) -> Any:
        try:
            return make()
        except StreamEnded:
            raise
        except Exception as error:  # sent to the trainer, which raises it
            within = error.__traceback__
            while within is not None and within.tb_frame.f_code.co_filename == __file__:
                within = within.tb_next  # skip the frames of this file
            text = "".join(traceback.format_exception(type(error), error, within))
            summary = f"{what()} raised {type(error).__name__}: {error}"
            raise SampleFailed(f"{summary:.600}\n\nits traceback:\n{text[-8000:]}") from error


def _name_of(request: BatchRequest, place: int | None = None) -> str:
    """Return a name for a sample of a request; without `place`, for all of its samples."""
    if request.stream is not None:
        batch = f"batch {request.place} of rank {request.stream[1]} in the stream"
        return batch if place is None else f"sample {place} of {batch}"
    indices = unflatten_state(request.indices, ())
    if place is not None:
        return f"sample {indices[place]!r:.80}"
    return f"{'samples' if isinstance(indices, list) else 'sample'} {indices!r:.200}"


class StreamEnded(Exception):
    """The stream ended before the requested batch."""


class Reader:
    """Reads the share of one trainer in one pass over a stream."""

    def __init__(self, loader: DataLoader[Any], request: BatchRequest) -> None:
        assert request.stream is not None
        world_size, rank, per_step = request.stream
        self._loader, self._seed = loader, request.seed
        self._strided = StridedDataset(loader.dataset, world_size, rank, per_step)
        self._size = strided_share(world_size, rank, per_step)
        self._next = 0  # batch
        self._state: Any
        self._kept: dict[int, Any] = {}
        self._begin()

    def take(self, place: int) -> Any:
        """Return the samples of a batch (without batching: the one sample); raises StreamEnded."""
        with preserve_random_state():
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
        with preserve_random_state():
            seed_everything(self._seed)
            self._iterator: Iterator[Any] = iter(self._strided)
            self._state = get_random_state()
        self._next = 0
        self._kept = {}

    def _read(self) -> Any:
        if self._loader.batch_size is None:
            for sample in self._iterator:
                return sample
            raise StreamEnded
        samples = list(islice(self._iterator, self._size))
        if not samples or (len(samples) < self._size and self._loader.drop_last):
            raise StreamEnded
        return samples


class Readers:
    """The readers of one loader: one for each trainer, in its latest pass."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._readers: dict[int, tuple[tuple[Any, ...], Reader]] = {}  # by the trainer's rank

    def take(self, request: BatchRequest) -> Any:
        """Return the samples of a request; raises StreamEnded, and what the dataset raises."""
        assert request.stream is not None
        rank, key = request.stream[1], (request.epoch, request.seed, request.stream)
        known = self._readers.get(rank)
        if known is None or known[0] != key:
            known = self._readers[rank] = key, Reader(self._loader, request)
        return known[1].take(request.place)
