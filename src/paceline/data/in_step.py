"""Streams in step: before each batch the workers tell each other how many samples they have for it.

Nobody knows how long streams are, and workers may have different numbers of samples. From what all
have told follow the weights, and when it is over. One that has run out repeats its last batch with
weight 0, or (pad=False) waits for the others.

Data that each worker has of its own already (PRESHARDED) needs nothing else, and is here as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch

from paceline.contribution import Announcer
from paceline.data.consensus import group_of
from paceline.data.course import Ranks
from paceline.data.draws import as_then, remembered
from paceline.data.elastic_pass import ElasticPass
from paceline.data.passage import Count, Passage
from paceline.data.reading import StreamCourse
from paceline.data.samples import named_items
from paceline.data.split import weight
from paceline.data.stream import samples_in
from paceline.errors import DataError

Tagged = tuple[int, int, Any]  # samples of a batch, its source, and the batch
ENDED, IDLE = -1, -2  # instead of a number of samples


class InStep:
    """Gives out batches of a stream, one global batch after the other."""

    def __init__(
        self,
        elastic: ElasticPass,
        announcer: Announcer,
        passage: Passage,
        course: StreamCourse | Count,
        too_few: str,
    ) -> None:
        self._elastic, self._announcer, self._passage = elastic, announcer, passage
        self._course, self._too_few = course, too_few
        self._group = group_of(elastic.job)
        self._seeds, self._is_elastic = elastic.seeds, elastic.is_elastic
        self.last: Any = None

    def is_guest(self, members: Ranks) -> bool:
        """Say whether the others had the next batch before this worker came, and it has no part."""
        is_behind = self._passage.counts and self._passage.cursor < self._course.taken
        return is_behind and self._elastic.seat not in members

    def nothing(self, spare: Any) -> Any:
        """Return some batch to take part with in such a step; it weighs nothing."""
        self._elastic.ledger.note_take()
        number, self.last = self._passage.cursor, spare
        self._passage.cursor = number + 1
        return self._announced(number, 0.0)

    def tell(self, count: int) -> list[int]:
        """Tell how many samples this worker has, and hear the same from the others.

        One that takes the place of a lost worker in the middle of a step has not been told, but
        knows what all had told before.
        """
        with self._elastic.job.reporter.waiting:
            return self._told(count)

    def _told(self, count: int) -> list[int]:
        if not self._is_elastic:
            return self._exchange(count)
        number = self._passage.cursor
        if self._passage.counts and number < self._course.taken and number in self._course.counts:
            return self._course.counts[number]
        counts: list[int] = self._elastic.together(lambda: self._exchange(count))
        self._course.counts[number] = counts
        return counts

    def _exchange(self, count: int) -> list[int]:
        counts = torch.empty(self._group.size, dtype=torch.int64)
        self._group.all_gather(torch.tensor([count]), out=counts)
        return counts.tolist()

    def is_over(self, counts: list[int], stops_short: bool) -> bool:
        """Say whether there is no further step."""
        missing = 0 if min(counts) >= 0 else sum(count < 0 for count in counts)
        is_first = self._passage.cursor == 0 and self._elastic.job.elastic.changes == 0
        if is_first and missing and (self._elastic.pad or missing == len(counts)):
            raise DataError(f"pl.shard: {self._named(counts)} no batch at all; {self._too_few}")
        return missing == len(counts) or (stops_short and ENDED in counts)

    def _named(self, counts: list[int]) -> str:
        ranks = [str(r) for r, count in zip(self._group.ranks, counts, strict=True) if count < 0]
        if len(ranks) == len(counts):
            return "the loader gives"
        return f"the loader gives rank {', '.join(ranks)} of {len(counts)}"

    def give(self, batch: Tagged | None, counts: list[int]) -> bool:
        """Let `last` be this worker's batch of a step, or once more the one before, and announce
        its weight; false if there is none to be given out."""
        self._elastic.ledger.note_take()
        number, passage = self._passage.cursor, self._passage
        passage.cursor = number + 1
        having = [count for count in counts if count >= 0]
        total = sum(having)
        here = 0 if batch is None else batch[0]
        passage.tally.note(number, here, total, len(counts) - len(having))
        if batch is not None:
            self.last = batch[2]
            self._announced(number, weight(here, total, len(counts)), here)
        elif self._elastic.pad:
            self._announced(number, 0.0)
        return batch is not None or self._elastic.pad

    def run_free(self, batches: Iterator[Tagged], first: int = 0) -> Iterator[Any]:
        """Yield batches, which begin with the `first`, without a word to the others."""
        passage, course = self._passage, self._course
        done = self._elastic.job.elastic.committed_steps if self._elastic.pad else None
        done = (done or 0) if passage.index == 0 else 0
        if passage.is_resumed:
            done = passage.cursor
        for number, (count, source, batch) in enumerate(batches, first):
            passage.cursor = number + 1
            if number < done:
                continue  # this worker's number has done that before
            course.use(number, source)
            passage.tally.note(number, count, count, 0)
            self.last = batch
            yield self._announced(number, 1.0, count)

    def _announced(self, number: int, weight: float, samples: int | None = None) -> Any:
        if self._seeds is not None:
            self._seeds.before_use(number)
        self._announcer.set(weight, samples)
        return self.last


def presharded(
    elastic: ElasticPass, batches: Iterable[Any], announcer: Announcer, too_few: str
) -> Iterator[Any]:
    """Yield the batches of a worker's own loader, in step with the other workers. One that takes
    over a number, or goes on from a checkpoint, leaves out as many as the others have had."""
    course = Count()
    take = course.take if elastic.is_elastic else course.use
    passage = elastic.open(course)
    things = [batches, getattr(batches, "dataset", None), getattr(batches, "sampler", None)]
    if not passage.is_resumed:
        passage.draws = remembered(things)
    steps = InStep(elastic, announcer, passage, course, too_few)
    is_behind = passage.is_resumed or elastic.job.env.number < elastic.nominal
    try:
        with as_then(passage.draws if passage.is_resumed else None, things):
            own = named_items(batches, "batch", f"rank {elastic.job.env.rank}")
            mine: Iterator[Tagged] = ((samples_in(batch), 0, batch) for batch in own)
            for used in islice(mine, passage.cursor if is_behind and not elastic.is_free else 0):
                steps.last = used[2]
        if elastic.is_free:
            yield from steps.run_free(mine)
            return
        while elastic.job.env.on_loss == "shrink" and steps.is_guest(()):
            first = next(mine, None)
            if first is None and steps.last is None:
                raise DataError("pl.shard: this worker came with no batch at all; " + too_few)
            mine = mine if first is None else chain([first], mine)
            yield steps.nothing(steps.last if first is None else first[2])
        while True:
            batch = next(mine, None)
            counts = steps.tell(ENDED if batch is None else batch[0])
            if steps.is_over(counts, stops_short=False):
                return
            take(passage.cursor)
            if batch is None and steps.last is None and elastic.pad:
                raise DataError("pl.shard: this worker came with no batch at all; " + too_few)
            if steps.give(batch, counts):
                yield steps.last
    finally:
        elastic.close(passage)
