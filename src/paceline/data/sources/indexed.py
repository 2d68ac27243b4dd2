"""A pass over a DataLoader whose samples have indices.

The user's loader is never iterated. A shallow copy of it is, with the same dataset, workers and
settings (and class, if that is one of the user's), in which only the sampler is another: it yields
this worker's part of every global batch, cut as the cursor says. The copy lives as long as the
user's loader, so that persistent workers survive from epoch to epoch.

When the workers of an elastic job change, batches that the copy has fetched ahead were cut for
workers that are not there any more: they are thrown away, and the copy begins again at the first
batch that this worker has not had. The batch that the script is computing is the script's. A pass
that is continued from a checkpoint begins in the middle in the same way.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from paceline.comm.group import Group
from paceline.data.cursor.indices import IndexCursor
from paceline.data.cursor.passes import Pass
from paceline.data.randomness import Seeds, mixed
from paceline.data.sources.samples import Named, Reseeding
from paceline.data.split.order import KeptOrder, LocalOrder
from paceline.data.split.plan import Plan
from paceline.data.split.weights import size_of, spread_one
from paceline.runtime.batch_weight import Announcer
from paceline.runtime.job import joined

Asked = tuple[int, float, int, int, int]  # batch, weight, samples here and of all, who has none


class CutParts:
    """This worker's parts from some batch on, for the copy's sampler."""

    def __init__(
        self,
        cursor: IndexCursor,
        seat: int,
        *,
        pad: bool,
        seeds: Seeds | None,
        say: Callable[[str], None],
    ) -> None:
        self._cursor, self._seat, self._first = cursor, seat, cursor.position
        self._pad, self._seeds, self._say = pad, seeds, say
        self.asked: deque[Asked] = deque()  # batches on their way
        self.end = self._first  # the number of batches, once it has been reached

    def __iter__(self) -> Iterator[Any]:
        batch, cursor = self._first, self._cursor
        while (units := cursor.units(batch)) is not None:
            part, weight = cursor.cut(batch, units, self._seat)
            if weight > 0.0 or self._pad:
                total, padded = cursor.counted(batch, units)
                if padded and self._pad:
                    self._mention_padding()
                part = plain(part)
                self.asked.append((batch, weight, size_of(part), total, padded))
                yield self._request(batch, part)
            batch += 1
        self.end = batch

    def _request(self, batch: int, units: Any) -> Any:
        return units if self._seeds is None else (self._seeds.of_making(batch), units)

    def _mention_padding(self) -> None:
        workers = len(self._cursor.members)
        self._say(
            f"shard: a global batch has too few samples for {workers} workers; those that get none"
            " repeat one with weight 0 (drop_last=True leaves such batches out)"
        )


class BatchMaker(Protocol):
    """Makes batches of the indices that it is given: a copy of the loader, or data workers."""

    reseeds: bool  # it is given a seed with the indices of each

    def begin(self, parts: Iterable[Any], worker_seed: int) -> Iterator[Any]:
        """Return an iterator over the batches that these parts make."""


class IndexedPass:
    """One pass: yields this worker's batches, each with its weight announced. A sampler of the user
    is told in `group`, or iterated by each worker."""

    def __init__(self, this: Pass, loader: BatchMaker, plan: Plan, group: Group | None) -> None:
        self._this, self._loader, self._plan = this, loader, plan
        self._seeds = this.seeds  # for the script
        self._making = this.making if loader.reseeds else None
        self._order = this.order(plan, group)
        self._cursor = self._make_cursor(plan, self._order)

    def _make_cursor(self, plan: Plan, order: LocalOrder | KeptOrder) -> IndexCursor:
        return IndexCursor(plan.rules(self._this.resize), order, self._this.members)

    def batches(self) -> Iterator[Any]:
        """Yield them, until nothing is left for anybody."""
        this, cursor = self._this, self._cursor
        this.open(cursor)
        if this.is_free:
            units = self._plan.units
            count = None if units is None else self._plan.num_steps(this.nominal, 0, pad=True)
            cursor.position = this.place_of_number(cursor, count)
        try:
            while True:
                yield from self._batches_of_one_cut()
                if this.is_free or (this.pad and cursor.units(cursor.position) is None):
                    return
                if cursor.units(cursor.position) is None:
                    this.meet()  # what somebody evaluated who is lost comes again
                    if cursor.units(cursor.position) is None:
                        return
        finally:
            this.close(cursor)

    @property
    def num_batches(self) -> int:
        """How many global batches there were."""
        return self._cursor.taken

    def _batches_of_one_cut(self) -> Iterator[Any]:
        """Yield batches until the workers change, or the pass is over."""
        this, cursor = self._this, self._cursor
        self._prepare()
        version, first = cursor.version, cursor.position
        parts = CutParts(cursor, this.seat, pad=this.pad, seeds=self._making, say=this.say)
        # Each worker augments its samples with other random numbers.
        numbers = (this.seed, this.epoch, 1 + this.job.data_number)
        seed = mixed(*numbers, first) if first else mixed(*numbers)
        batches = self._timed(self._loader.begin(parts, seed))
        while True:
            batch = next(batches, self)
            if batch is self:
                cursor.position = parts.end
                cursor.take(parts.end - 1)
                return
            this.ledger.note_take()
            number, weight, *counts = parts.asked.popleft()
            cursor.position = number + 1
            cursor.take(number)
            cursor.tally.note(number, *counts)
            if self._seeds is not None:
                self._seeds.before_use(number)
            this.announcer.set(weight, counts[0])
            yield batch
            del batch  # who makes the next one may need its memory
            self._prepare()
            if cursor.version != version:
                return

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches that come; for those who measure."""
        return batches

    def _prepare(self) -> None:
        if isinstance(self._order, LocalOrder):
            return
        this, cursor = self._this, self._cursor
        if not this.pad and self._plan.cut is spread_one:
            self._order.prepare(sys.maxsize)  # who is left out needs the next batch at once
        else:
            self._order.prepare(cursor.span(cursor.position + this.lookahead)[1])
        if cursor.counts or not this.is_elastic:
            self._order.forget(cursor.span(this.done(cursor))[0])


class Slot:
    """The sampler of the copied loader: yields what the pass that begins has put into it."""

    def __init__(self) -> None:
        self.parts: Iterable[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        assert self.parts is not None, "a pass puts its parts here first"
        return iter(self.parts)  # a DataLoader may call this twice before it takes anything


class IndexedLoader:
    """The copy of one loader, with a slot for the parts of each pass."""

    def __init__(self, loader: DataLoader[Any], *, reseeds: bool = False) -> None:
        self._slot = Slot()
        self.reseeds = reseeds  # before each batch is made: its parts come with a seed
        place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        job = joined()
        who = "this rank" if job is None else f"rank {job.env.rank}"
        dataset = Reseeding(loader.dataset, who) if reseeds else Named(loader.dataset, who)
        self._copy = copied(loader, **{place: self._slot}, dataset=dataset)

    def begin(self, parts: Iterable[Any], worker_seed: int) -> Iterator[Any]:
        """Return an iterator over the batches that these parts make."""
        self._slot.parts = parts
        self._copy.generator.manual_seed(worker_seed)
        return iter(self._copy)

    def run(
        self, parts: Iterable[tuple[Any, float]], announcer: Announcer, worker_seed: int
    ) -> Iterator[Any]:
        """Yield the batches of parts that come with their weights, each with it announced."""
        weights: deque[float] = deque()  # of parts that were asked for and not yet handed out

        def asked() -> Iterator[Any]:
            for part, weight in parts:
                weights.append(weight)
                yield part

        for batch in self.begin(asked(), worker_seed):
            announcer.set(weights.popleft())
            yield batch


def lookahead_of(loader: DataLoader[Any]) -> int:
    """Return how many batches a loader may ask for before they are needed."""
    return loader.num_workers * (loader.prefetch_factor or 0)


def settings_of(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return what tells whether a copy is still like its loader, some of whose attributes may be
    assigned at any time. Identities hold, because the copy keeps the objects alive."""
    passing = ("_iterator", "_IterableDataset_len_called", "generator")
    return tuple((name, id(value)) for name, value in vars(loader).items() if name not in passing)


def copied(loader: DataLoader[Any], **changes: Any) -> Any:
    """Copy a loader with some attributes changed. DataLoader forbids to assign them, because its
    iterator may be under way; the copy has none yet. Batches come in order: only so do the
    workers have parts of the same global batch at the same time."""
    made = copy.copy(loader)
    vars(made).update(changes, generator=torch.Generator(), in_order=True, _iterator=None)
    return made


def plain(part: Any) -> Any:
    """Indices as Python's own: datasets may be lists, and dicts with numbers as keys."""
    if isinstance(part, (np.ndarray, np.generic)):
        return part.tolist()
    return list(part) if isinstance(part, range) else part
