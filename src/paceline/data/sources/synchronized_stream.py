"""Streams in step: before each batch the workers tell each other how many samples they have for it.

Nobody knows how long streams are, and workers may have different numbers of samples. From what all
have told follow the weights, and when it is over. One that has run out repeats its last batch with
weight 0, or (pad=False) waits for the others.

Data that each worker has of its own needs nothing else: a pass over it is here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch

from paceline.data.cursor.cursor import Cursor, Ranks
from paceline.data.cursor.passes import Pass
from paceline.data.randomness import as_then, remembered
from paceline.data.split.weights import weight
from paceline.errors import DataError

Tagged = tuple[int, int, Any]  # samples of a batch, its source, and the batch
ENDED, IDLE = -1, -2  # instead of a number of samples


class InStep:
    """Gives out batches of a stream, one global batch after the other."""

    def __init__(self, this: Pass, cursor: Cursor, too_few: str) -> None:
        self._this, self._cursor, self._too_few = this, cursor, too_few
        self._seeds = this.seeds
        self.last: Any = None

    def is_guest(self, members: Ranks) -> bool:
        """Say whether the others had the next batch before this worker came, and it has no part."""
        is_behind = self._cursor.counts and self._cursor.position < self._cursor.taken
        return is_behind and self._this.seat not in members

    def nothing(self, spare: Any) -> Any:
        """Return some batch to take part with in such a step; it weighs nothing."""
        self._this.ledger.note_take()
        number, self.last = self._cursor.position, spare
        self._cursor.position = number + 1
        return self._announced(number, 0.0)

    def tell(self, count: int) -> list[int]:
        """Tell how many samples this worker has, and hear the same from the others.

        One that takes the place of a lost worker in the middle of a step has not been told, but
        knows what all had told before.
        """
        with self._this.job.reporter.waiting:
            return self._told(count)

    def _told(self, count: int) -> list[int]:
        if not self._this.is_elastic:
            return self._exchange(count)
        cursor, number = self._cursor, self._cursor.position
        if cursor.counts and number < cursor.taken and number in cursor.told:
            return cursor.told[number]
        counts: list[int] = self._this.together(lambda: self._exchange(count))
        cursor.told[number] = counts
        return counts

    def _exchange(self, count: int) -> list[int]:
        group = self._this.group
        counts = torch.empty(group.size, dtype=torch.int64)
        group.all_gather(torch.tensor([count]), out=counts)
        return counts.tolist()

    def is_over(self, counts: list[int], stops_short: bool) -> bool:
        """Say whether there is no further step."""
        missing = 0 if min(counts) >= 0 else sum(count < 0 for count in counts)
        is_first = self._cursor.position == 0 and self._this.job.elastic.changes == 0
        if is_first and missing and (self._this.pad or missing == len(counts)):
            raise DataError(f"pl.shard: {self._named(counts)} no batch at all; {self._too_few}")
        return missing == len(counts) or (stops_short and ENDED in counts)

    def _named(self, counts: list[int]) -> str:
        told = zip(self._this.group.ranks, counts, strict=True)
        ranks = [str(rank) for rank, count in told if count < 0]
        if len(ranks) == len(counts):
            return "the loader gives"
        return f"the loader gives rank {', '.join(ranks)} of {len(counts)}"

    def give(self, batch: Tagged | None, counts: list[int]) -> bool:
        """Let `last` be this worker's batch of a step, or once more the one before, and announce
        its weight; false if there is none to be given out."""
        self._this.ledger.note_take()
        number = self._cursor.position
        self._cursor.position = number + 1
        having = [count for count in counts if count >= 0]
        total = sum(having)
        here = 0 if batch is None else batch[0]
        self._cursor.tally.note(number, here, total, len(counts) - len(having))
        if batch is not None:
            self.last = batch[2]
            self._announced(number, weight(here, total, len(counts)), here)
        elif self._this.pad:
            self._announced(number, 0.0)
        return batch is not None or self._this.pad

    def run_free(self, batches: Iterator[Tagged], first: int = 0) -> Iterator[Any]:
        """Yield batches, which begin with the `first`, without a word to the others."""
        cursor = self._cursor
        done = self._this.job.elastic.committed_steps if self._this.pad else None
        done = (done or 0) if cursor.index == 0 else 0
        if cursor.is_resumed:
            done = cursor.position
        for number, (count, source, batch) in enumerate(batches, first):
            cursor.position = number + 1
            if number < done:
                continue  # this worker's number has done that before
            cursor.use(number, source)
            cursor.tally.note(number, count, count, 0)
            self.last = batch
            yield self._announced(number, 1.0, count)

    def _announced(self, number: int, weight: float, samples: int | None = None) -> Any:
        if self._seeds is not None:
            self._seeds.before_use(number)
        self._this.announcer.set(weight, samples)
        return self.last


def own_batches(
    this: Pass,
    read: Callable[[], Iterator[tuple[int, Any]]],
    things: Sequence[Any],
    too_few: str,
    *,
    is_free: bool = False,
    stops_short: bool = False,
) -> Iterator[Any]:
    """Yield the batches of data that is this worker's own, in step with the other workers. `read`
    yields them from the beginning, with the number of samples in each; `things` may draw random
    numbers then. One that takes over a number, or goes on from a checkpoint, leaves out as many as
    the others have had. `is_free`: nobody waits for anybody."""
    cursor = Cursor(this.members)
    take = cursor.take if this.is_elastic else cursor.use
    this.open(cursor)
    if not cursor.is_resumed:
        cursor.draws = remembered(things)
    steps = InStep(this, cursor, too_few)
    is_behind = cursor.is_resumed or this.job.env.number < this.nominal
    try:
        with as_then(cursor.draws if cursor.is_resumed else None, things):
            mine: Iterator[Tagged] = ((count, 0, batch) for count, batch in read())
            for used in islice(mine, cursor.position if is_behind and not is_free else 0):
                steps.last = used[2]
        if is_free:
            yield from steps.run_free(mine)
            return
        while this.job.env.on_loss == "shrink" and steps.is_guest(()):
            first = next(mine, None)
            if first is None and steps.last is None:
                raise DataError("pl.shard: this worker came with no batch at all; " + too_few)
            mine = mine if first is None else chain([first], mine)
            yield steps.nothing(steps.last if first is None else first[2])
        while True:
            batch = next(mine, None)
            counts = steps.tell(ENDED if batch is None else batch[0])
            if steps.is_over(counts, stops_short):
                return
            take(cursor.position)
            if batch is None and steps.last is None and this.pad:
                raise DataError("pl.shard: this worker came with no batch at all; " + too_few)
            if steps.give(batch, counts):
                yield steps.last
    finally:
        this.close(cursor)
