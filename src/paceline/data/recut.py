"""A pass over a loader with indices.

A copy of the loader (indexed.py) yields this worker's parts, cut as the course of the pass says.
When the workers of an elastic job change, batches that the copy has fetched ahead were cut for
workers that are not there any more: they are thrown away, and the copy begins again at the first
batch that this worker has not had. The batch that the script is computing is the script's. A pass
that is continued from a checkpoint begins in the middle in the same way.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from paceline.contribution import Announcer
from paceline.data.consensus import group_of
from paceline.data.course import Course
from paceline.data.elastic_pass import ElasticPass
from paceline.data.indexed import plain
from paceline.data.order import LocalOrder, mixed
from paceline.data.passage import Passage
from paceline.data.plan import Plan
from paceline.data.repeatable import Seeds
from paceline.data.split import size_of, spread_one
from paceline.data.told import KeptOrder

Asked = tuple[int, float, int, int, int]  # batch, weight, samples here and of all, who has none


class CutParts:
    """This worker's parts from some batch on, for the copy's sampler."""

    def __init__(
        self,
        course: Course,
        seat: int,
        first: int,
        *,
        pad: bool,
        seeds: Seeds | None,
        say: Callable[[str], None],
    ) -> None:
        self._course, self._seat, self._first = course, seat, first
        self._pad, self._seeds, self._say = pad, seeds, say
        self.asked: deque[Asked] = deque()  # batches on their way
        self.end = first  # the number of batches, once it has been reached

    def __iter__(self) -> Iterator[Any]:
        batch, course = self._first, self._course
        while (units := course.units(batch)) is not None:
            part, weight = course.cut(batch, units, self._seat)
            if weight > 0.0 or self._pad:
                total, padded = course.counted(batch, units)
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
        workers = len(self._course.members)
        self._say(
            f"shard: a global batch has too few samples for {workers} workers; those that get none"
            " repeat one with weight 0 (drop_last=True leaves such batches out)"
        )


class BatchMaker(Protocol):
    """Makes batches of the indices that it is given: a copy of the loader, or data workers."""

    reseeds: bool  # it is given a seed with the indices of each

    def begin(self, parts: Iterable[Any], worker_seed: int) -> Iterator[Any]:
        """Return an iterator over the batches that these parts make."""


class Recut:
    """One pass."""

    def __init__(
        self,
        elastic: ElasticPass,
        loader: BatchMaker,
        plan: Plan,
        announcer: Announcer,
        lookahead: int,
        say: Callable[[str], None],
    ) -> None:
        self._elastic, self._loader, self._plan = elastic, loader, plan
        self._announcer, self._lookahead, self._say = announcer, lookahead, say
        self._seeds = elastic.seeds  # for the script
        self._making = elastic.making if loader.reseeds else None
        self._order = self._make_order()
        self._course = Course(plan.rules(elastic.resize), self._order, elastic.members)

    def batches(self) -> Iterator[Any]:
        """Yield this worker's batches, each with its weight announced."""
        elastic, course = self._elastic, self._course
        kept = self._order if isinstance(self._order, KeptOrder) else None
        passage = elastic.open(course, kept)
        if elastic.is_free:
            units = self._plan.units
            count = None if units is None else self._plan.num_steps(elastic.nominal, 0, pad=True)
            passage.cursor = elastic.place_of_number(passage, count)
        try:
            while True:
                yield from self._batches_of_one_cut(passage)
                if elastic.is_free or (elastic.pad and course.units(passage.cursor) is None):
                    return
                if course.units(passage.cursor) is None:
                    elastic.meet()  # what somebody evaluated who is lost comes again
                    if course.units(passage.cursor) is None:
                        return
        finally:
            elastic.close(passage)

    @property
    def num_batches(self) -> int:
        """How many global batches there were."""
        return self._course.taken

    def _make_order(self) -> LocalOrder | KeptOrder:
        elastic, plan = self._elastic, self._plan
        if plan.told is None:
            return plan.local_order(elastic.seed, elastic.epoch)
        group = None if elastic.is_free else group_of(elastic.job)
        return KeptOrder(group, plan.told, elastic.together)

    def _batches_of_one_cut(self, passage: Passage) -> Iterator[Any]:
        """Yield batches until the workers change, or the pass is over."""
        elastic, course = self._elastic, self._course
        self._prepare(passage)
        version = course.version
        first = passage.cursor
        parts = CutParts(
            course, elastic.seat, first, pad=elastic.pad, seeds=self._making, say=self._say
        )
        # Each worker augments its samples with other random numbers.
        numbers = (elastic.seed, elastic.epoch, 1 + elastic.job.data_number)
        batches = self._loader.begin(parts, mixed(*numbers, first) if first else mixed(*numbers))
        while True:
            batch = next(batches, self)
            if batch is self:
                passage.cursor = parts.end
                course.take(parts.end - 1)
                return
            elastic.ledger.note_take()
            number, weight, *counts = parts.asked.popleft()
            passage.cursor = number + 1
            course.take(number)
            passage.tally.note(number, *counts)
            if self._seeds is not None:
                self._seeds.before_use(number)
            self._announcer.set(weight, counts[0])
            yield batch
            del batch  # who makes the next one may need its memory
            self._prepare(passage)
            if course.version != version:
                return

    def _prepare(self, passage: Passage) -> None:
        if isinstance(self._order, LocalOrder):
            return
        if not self._elastic.pad and self._plan.cut is spread_one:
            self._order.prepare(sys.maxsize)  # who is left out needs the next batch at once
        else:
            self._order.prepare(self._course.span(passage.cursor + self._lookahead)[1])
        if passage.counts or not self._elastic.is_elastic:
            self._order.forget(self._course.span(self._elastic.done(passage))[0])
