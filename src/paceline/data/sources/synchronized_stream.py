"""Streams in lockstep: before each batch the workers exchange how many samples they have for it.

The length of a stream is not known, and workers may have different numbers of samples. The weights
of a step follow from the counts of all workers, and so does the end of the pass. A worker that has
run out repeats its last batch with weight 0, or (pad=False) waits for the other workers.

A pass over data that each worker has of its own needs nothing else, and is here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch

from paceline.data.cursor.cursor import Cursor, Ranks
from paceline.data.data_pass import DataPass
from paceline.data.randomness import save_random_state, with_random_state
from paceline.data.split.weights import weight
from paceline.errors import DataError

Tagged = tuple[int, int, Any]  # samples of a batch, its source, and the batch
ENDED, IDLE = -1, -2  # instead of a number of samples


class SynchronizedSteps:
    """Hands out batches of a stream, one global batch after the other."""

    def __init__(self, data_pass: DataPass, cursor: Cursor, too_few: str) -> None:
        self._pass, self._cursor, self._too_few = data_pass, cursor, too_few
        self._seeds = data_pass.script_seeds
        self.last: Any = None

    def is_guest(self, members: Ranks) -> bool:
        """Return whether the other workers took the next batch before this worker joined."""
        lags = self._cursor.counts and self._cursor.position < self._cursor.taken
        return lags and self._pass.member not in members

    def guest_batch(self, spare: Any) -> Any:
        """Return a batch to take part in such a step with weight 0."""
        self._pass.progress.begin_batch()
        number, self.last = self._cursor.position, spare
        self._cursor.position = number + 1
        return self._announced(number, 0.0)

    def exchange_counts(self, count: int) -> list[int]:
        """Return how many samples each worker has for the next batch.

        The replacement of a lost worker in the middle of a step does not exchange counts again: its
        cursor has those of this batch.
        """
        with self._pass.job.reporter.waiting:
            return self._agreed_counts(count)

    def _agreed_counts(self, count: int) -> list[int]:
        if not self._pass.is_elastic:
            return self._exchange(count)
        cursor, number = self._cursor, self._cursor.position
        if cursor.counts and number < cursor.taken and number in cursor.sample_counts:
            return cursor.sample_counts[number]
        counts: list[int] = self._pass.run_collective(lambda: self._exchange(count))
        cursor.sample_counts[number] = counts
        return counts

    def _exchange(self, count: int) -> list[int]:
        group = self._pass.group
        counts = torch.empty(group.size, dtype=torch.int64)
        group.all_gather(torch.tensor([count]), out=counts)
        return counts.tolist()

    def is_over(self, counts: list[int], stops_short: bool) -> bool:
        """Return whether there is no further step."""
        missing = 0 if min(counts) >= 0 else sum(count < 0 for count in counts)
        is_first = self._cursor.position == 0 and self._pass.job.elastic.num_changes == 0
        if is_first and missing and (self._pass.pad or missing == len(counts)):
            raise DataError(
                f"pl.shard: {self._describe_missing(counts)} no batch at all; {self._too_few}"
            )
        return missing == len(counts) or (stops_short and ENDED in counts)

    def _describe_missing(self, counts: list[int]) -> str:
        pairs = zip(self._pass.group.ranks, counts, strict=True)
        ranks = [str(rank) for rank, count in pairs if count < 0]
        if len(ranks) == len(counts):
            return "the loader gives"
        return f"the loader gives rank {', '.join(ranks)} of {len(counts)}"

    def prepare_batch(self, batch: Tagged | None, counts: list[int]) -> bool:
        """Set `last` to this worker's batch of a step (without one, keep the one before), and
        announce its weight. Return whether there is a batch to hand out."""
        self._pass.progress.begin_batch()
        number = self._cursor.position
        self._cursor.position = number + 1
        having = [count for count in counts if count >= 0]
        total = sum(having)
        here = 0 if batch is None else batch[0]
        self._cursor.tally.note(number, here, total, len(counts) - len(having))
        if batch is not None:
            self.last = batch[2]
            self._announced(number, weight(here, total, len(counts)), here)
        elif self._pass.pad:
            self._announced(number, 0.0)
        return batch is not None or self._pass.pad

    def run_free(self, batches: Iterator[Tagged], first: int = 0) -> Iterator[Any]:
        """Yield batches, beginning with number `first`, without any exchange with other workers."""
        cursor = self._cursor
        done = self._pass.job.elastic.committed_steps if self._pass.pad else None
        done = (done or 0) if cursor.index == 0 else 0
        if cursor.is_resumed:
            done = cursor.position
        for number, (count, source, batch) in enumerate(batches, first):
            cursor.position = number + 1
            if number < done:
                continue  # done before, under this worker's number
            cursor.use(number, source)
            cursor.tally.note(number, count, count, 0)
            self.last = batch
            yield self._announced(number, 1.0, count)

    def _announced(self, number: int, weight: float, samples: int | None = None) -> Any:
        if self._seeds is not None:
            self._seeds.before_use(number)
        self._pass.announcer.set(weight, samples)
        return self.last


def own_batches(
    data_pass: DataPass,
    read: Callable[[], Iterator[Tagged]],
    owners: Sequence[Any],
    too_few: str,
    *,
    is_free_running: bool = False,
    stops_short: bool = False,
) -> Iterator[Any]:
    """Yield the batches of data that is this worker's own, with as many steps as the other workers.
    `read` yields them from the beginning; the generators of `owners` may draw random numbers then.
    A worker that takes over a number, or resumes from a checkpoint, skips the batches that were
    used. `is_free_running`: no worker waits for another."""
    cursor = Cursor(data_pass.members)
    take = cursor.take if data_pass.is_elastic else cursor.use
    data_pass.open(cursor)
    if not cursor.is_resumed:
        cursor.draws = save_random_state(owners)
    steps = SynchronizedSteps(data_pass, cursor, too_few)
    has_used = cursor.is_resumed or data_pass.job.env.number < data_pass.nominal
    try:
        with with_random_state(cursor.draws if cursor.is_resumed else None, owners):
            mine = read()
            for used in islice(mine, cursor.position if has_used and not is_free_running else 0):
                steps.last = used[2]
        if is_free_running:
            yield from steps.run_free(mine)
            return
        while data_pass.job.env.on_loss == "shrink" and steps.is_guest(()):
            first = next(mine, None)
            if first is None and steps.last is None:
                raise DataError("pl.shard: this worker joined and has no batch at all; " + too_few)
            mine = mine if first is None else chain([first], mine)
            yield steps.guest_batch(steps.last if first is None else first[2])
        while True:
            batch = next(mine, None)
            counts = steps.exchange_counts(ENDED if batch is None else batch[0])
            if steps.is_over(counts, stops_short):
                return
            take(cursor.position)
            if batch is None and steps.last is None and data_pass.pad:
                raise DataError("pl.shard: this worker joined and has no batch at all; " + too_few)
            if steps.prepare_batch(batch, counts):
                yield steps.last
    finally:
        data_pass.close(cursor)
