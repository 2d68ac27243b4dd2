"""A pass over a DataLoader whose samples have indices.

The user's loader is never iterated. A shallow copy is, with the same class, dataset, workers and
settings. Only its sampler differs: it yields this worker's part of every global batch, as the
cursor splits it. The copy lives as long as the user's loader, so that persistent workers survive
from epoch to epoch.

When the workers of an elastic job change, batches that the copy has prefetched were split for the
previous workers. They are dropped, and the copy starts again at the first batch that this worker
has not had. The script keeps the batch that it is computing. A pass that continues from a
checkpoint starts in the middle in the same way.
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
from paceline.data.data_pass import DataPass
from paceline.data.randomness import Seeds, mix_seeds
from paceline.data.sources.pinning import is_pinning_refused
from paceline.data.sources.samples import ErrorReportingDataset, ReseedingDataset
from paceline.data.split.order import LocalOrder, SamplerOrder
from paceline.data.split.plan import BatchPlan
from paceline.data.split.weights import size_of, spread_one
from paceline.runtime.batch_weight import Announcer
from paceline.runtime.job import joined

# Batch, weight, samples here and of all workers, workers without a sample.
RequestedBatch = tuple[int, float, int, int, int]


class CutParts:
    """This worker's parts from some batch on, for the sampler of the loader's copy."""

    def __init__(
        self,
        cursor: IndexCursor,
        member: int,
        *,
        pad: bool,
        seeds: Seeds | None,
        log_once: Callable[[str], None],
    ) -> None:
        self._cursor, self._member, self._first = cursor, member, cursor.position
        self._pad, self._seeds, self._log_once = pad, seeds, log_once
        self.requested: deque[RequestedBatch] = deque()  # not handed out yet
        self.end = self._first  # the number of batches, once it has been reached

    def __iter__(self) -> Iterator[Any]:
        batch, cursor = self._first, self._cursor
        while (units := cursor.units(batch)) is not None:
            part, weight = cursor.cut(batch, units, self._member)
            if weight > 0.0 or self._pad:
                total, padded = cursor.counted(batch, units)
                if padded and self._pad:
                    self._mention_padding()
                part = plain(part)
                self.requested.append((batch, weight, size_of(part), total, padded))
                yield self._request(batch, part)
            batch += 1
        self.end = batch

    def _request(self, batch: int, units: Any) -> Any:
        return units if self._seeds is None else (self._seeds.of_making(batch), units)

    def _mention_padding(self) -> None:
        workers = len(self._cursor.members)
        self._log_once(
            f"shard: a global batch has too few samples for {workers} workers; workers without a"
            " sample repeat one with weight 0 (drop_last=True leaves such batches out)"
        )


class BatchMaker(Protocol):
    """Makes batches from indices: a copy of the loader, or data workers."""

    reseeds: bool  # the indices of each batch come with a seed

    def begin(self, parts: Iterable[Any], worker_seed: int) -> Iterator[Any]:
        """Return an iterator over the batches that these parts make."""


class IndexedPass:
    """One pass over this worker's batches, each with its weight announced. The user's own sampler
    is broadcast in `group`; without a group each worker iterates its own."""

    def __init__(
        self, data_pass: DataPass, loader: BatchMaker, plan: BatchPlan, group: Group | None
    ) -> None:
        self._pass, self._loader, self._plan = data_pass, loader, plan
        self._script_seeds = data_pass.script_seeds
        self._dataset_seeds = data_pass.dataset_seeds if loader.reseeds else None
        self._order = data_pass.order(plan, group)
        self._cursor = self._make_cursor(plan, self._order)

    def _make_cursor(self, plan: BatchPlan, order: LocalOrder | SamplerOrder) -> IndexCursor:
        return IndexCursor(plan.rules(self._pass.resize), order, self._pass.members)

    def batches(self) -> Iterator[Any]:
        """Yield batches until no worker has any left."""
        data_pass, cursor = self._pass, self._cursor
        data_pass.open(cursor)
        if data_pass.is_free_running:
            units = self._plan.units
            count = None if units is None else self._plan.num_steps(data_pass.nominal, 0, pad=True)
            cursor.position = data_pass.first_batch_of_number(cursor, count)
        try:
            while True:
                yield from self._batches_of_one_version()
                if data_pass.is_free_running:
                    return
                if cursor.units(cursor.position) is None:
                    if data_pass.pad:
                        return
                    data_pass.wait_for_workers()  # batches of a lost worker are evaluated again
                    if cursor.units(cursor.position) is None:
                        return
        finally:
            data_pass.close(cursor)

    @property
    def num_batches(self) -> int:
        """How many global batches there were."""
        return self._cursor.taken

    def _batches_of_one_version(self) -> Iterator[Any]:
        """Yield batches until the workers change or the pass is over."""
        data_pass, cursor = self._pass, self._cursor
        self._prepare()
        version, first = cursor.version, cursor.position
        parts = CutParts(
            cursor,
            data_pass.member,
            pad=data_pass.pad,
            seeds=self._dataset_seeds,
            log_once=data_pass.log_once,
        )
        # Each worker augments its samples with random numbers of its own.
        numbers = (data_pass.seed, data_pass.epoch, 1 + data_pass.job.data_number)
        seed = mix_seeds(*numbers, first) if first else mix_seeds(*numbers)
        batches = self._timed(self._loader.begin(parts, seed))
        while True:
            batch = next(batches, self)
            if batch is self:
                cursor.position = parts.end
                cursor.take(parts.end - 1)
                return
            data_pass.progress.begin_batch()
            number, weight, *counts = parts.requested.popleft()
            cursor.position = number + 1
            cursor.take(number)
            cursor.tally.note(number, *counts)
            if self._script_seeds is not None:
                self._script_seeds.before_use(number)
            data_pass.announcer.set(weight, counts[0])
            yield batch
            del batch  # making the next one may need its memory
            self._prepare()
            if cursor.version != version:
                return

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; a subclass measures them."""
        return batches

    def _prepare(self) -> None:
        if isinstance(self._order, LocalOrder):
            return
        data_pass, cursor = self._pass, self._cursor
        if not data_pass.pad and self._plan.cut is spread_one:
            self._order.prepare(sys.maxsize)  # a worker without a batch needs the next one at once
        else:
            self._order.prepare(cursor.span(cursor.position + data_pass.lookahead)[1])
        if cursor.counts or not data_pass.is_elastic:
            self._order.forget(cursor.span(data_pass.num_done(cursor))[0])


class PartsSampler:
    """The sampler of the copied loader: yields the parts of the current pass."""

    def __init__(self) -> None:
        self.parts: Iterable[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        assert self.parts is not None, "a pass sets its parts first"
        return iter(self.parts)  # a DataLoader may call this twice before it takes anything


class IndexedLoader:
    """The copy of one loader, whose sampler yields the parts of each pass."""

    def __init__(self, loader: DataLoader[Any], *, reseeds: bool = False) -> None:
        self._sampler = PartsSampler()
        self.reseeds = reseeds  # each part comes with a seed
        attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        job = joined()
        where = "this rank" if job is None else f"rank {job.env.rank}"
        wrap = ReseedingDataset if reseeds else ErrorReportingDataset
        self._copy = copied(
            loader, **{attribute: self._sampler}, dataset=wrap(loader.dataset, where)
        )

    def begin(self, parts: Iterable[Any], worker_seed: int) -> Iterator[Any]:
        """Return an iterator over the batches that these parts make."""
        self._sampler.parts = parts
        self._copy.generator.manual_seed(worker_seed)
        return iter(self._copy)

    def run(
        self, parts: Iterable[tuple[Any, float]], announcer: Announcer, worker_seed: int
    ) -> Iterator[Any]:
        """Yield the batches of weighted parts, with each weight announced."""
        weights: deque[float] = deque()  # of parts that were requested and not handed out yet

        def requested() -> Iterator[Any]:
            for part, weight in parts:
                weights.append(weight)
                yield part

        for batch in self.begin(requested(), worker_seed):
            announcer.set(weights.popleft())
            yield batch


def lookahead_of(loader: DataLoader[Any]) -> int:
    """Return how many batches a loader may request before they are needed."""
    return loader.num_workers * (loader.prefetch_factor or 0)


def settings_of(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return a key that changes when an attribute of the loader is assigned, to see whether a copy
    is up to date. Identities are safe, because the copy keeps the objects alive."""
    ignored = ("_iterator", "_IterableDataset_len_called", "generator")
    return tuple((name, id(value)) for name, value in vars(loader).items() if name not in ignored)


def copied(loader: DataLoader[Any], **changes: Any) -> Any:
    """Copy a loader with some attributes changed. DataLoader forbids assigning them, because it may
    have an iterator; the copy has none. Batches come in order, so that the workers have parts of
    the same global batch at the same time."""
    made = copy.copy(loader)
    vars(made).update(changes, generator=torch.Generator(), in_order=True, _iterator=None)
    if made.pin_memory and is_pinning_refused():
        made.pin_memory = False
    return made


def plain(part: Any) -> Any:
    """Return indices as Python numbers: datasets may be lists, or dicts with numbers as keys."""
    if isinstance(part, (np.ndarray, np.generic)):
        return part.tolist()
    return list(part) if isinstance(part, range) else part
