"""Samples of a stream by their place, although a stream only comes in sequence.

A READER goes through the stream for one trainer and keeps its share of it (data/stream.py). Orders
come about in sequence: what lies between two of them is kept until it is asked for. An order for a
place that is behind, after another data worker has died or in the next pass, makes the reader begin
again. It has random generators of its own, seeded when it begins, so that whoever reads the stream
again finds the same in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.pipeline.messages import Order
from paceline.data.pipeline.randomness import (
    State,
    get_random_state,
    kept_random_state,
    set_random_state,
)
from paceline.data.repeatable import seed_everything
from paceline.data.split import strided_share
from paceline.data.stream import Strided

_KEPT = 1024  # batches that were passed over


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
        self._state: State
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
