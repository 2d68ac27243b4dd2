"""The course of one pass over a stream while workers come and go: arithmetic only.

A stream can only be read from its beginning, and nobody knows its length. So a READING says which
positions of it have not been used: some that were passed, because the worker that had them was lost
before they counted, and all from a certain one on. After a change every worker reads the stream
again, leaves out what is not in the reading, and strides over the rest, which is numbered anew.

A loader with processes of its own has a stream in each: its SOURCES, whose batches come in turn.
Stages, taken and committed are those of course.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import DataError

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """What is left of a stream; numbers 0, 1, ... stand for the positions in it."""

    passed: tuple[int, ...] = ()  # positions below `base`
    base: int = 0

    def position(self, number: int) -> int:
        """Return the position in the stream."""
        behind = number - len(self.passed)
        return self.passed[number] if behind < 0 else self.base + behind

    def numbering(self) -> Callable[[int], int | None]:
        """Return a function that numbers the positions; None for those that have been used."""
        numbers = {position: number for number, position in enumerate(self.passed)}
        shift, base = len(self.passed) - self.base, self.base
        return lambda at: at + shift if at >= base else numbers.get(at)

    def without(self, count: int, again: list[int]) -> Reading:
        """Return what is left when the first `count` have been used, but for some positions."""
        base = self.base + max(0, count - len(self.passed))
        return Reading(tuple(sorted((*self.passed[count:], *again))), base)


@dataclass(frozen=True)
class ReadingStage:
    """Global batches with the same workers, and what was left when they began."""

    first: int  # batch
    members: Ranks
    readings: Mapping[int, Reading]  # by source; those not named are whole

    def reading(self, source: int) -> Reading:
        return self.readings.get(source, Reading())


class StreamCourse:
    """How far a pass over a stream is. `per_step`: samples of a batch, by number of workers."""

    def __init__(
        self, per_step: Callable[[int], int], members: Ranks, num_sources: int = 1
    ) -> None:
        self._per_step, self._num_sources = per_step, num_sources
        self.stages = [ReadingStage(0, members, {})]
        self.batches: dict[int, int] = {}  # by source: of this stage, so far
        self.taken = 0
        self.committed = 0
        self.counts: dict[int, list[int]] = {}  # by batch that has not counted: see told_counts
        self._given: list[tuple[int, ReadingStage, int, int]] = []  # batch, stage, source, number
        self.version = 0  # grows when stages may have changed
        self.reissued = 0  # samples that were used again

    def dropped(self, samples: int) -> int:  # noqa: ARG002
        """Return 0: how long a stream is, nobody knows."""
        return 0

    @property
    def members(self) -> Ranks:
        return self.stages[-1].members

    def stage(self, batch: int) -> ReadingStage:
        """Return the stage of a batch."""
        return next(s for s in reversed(self.stages) if s.first <= batch or s is self.stages[0])

    def stage_of(self, batch: int) -> int:
        """Return the first batch of the stage to which a batch belongs."""
        return self.stage(batch).first

    def take(self, batch: int, source: int = 0) -> None:
        """Note that a batch has been given out, and of which source it is."""
        if batch < self.taken:
            return  # the others were further
        number = self.batches.get(source, 0)
        self._given.append((batch, self.stages[-1], source, number))
        self.batches[source] = number + 1
        self.taken = batch + 1

    def use(self, batch: int, source: int = 0) -> None:
        """The same where workers stay: nothing of it comes again."""
        self.batches[source] = self.batches.get(source, 0) + 1
        self.taken = self.committed = batch + 1

    def commit(self, batches: int) -> None:
        """Note that so many batches have counted."""
        self.committed = max(self.committed, batches)
        self._given = [given for given in self._given if given[0] >= self.committed]
        self.counts = {b: counts for b, counts in self.counts.items() if b >= self.committed}

    def change(
        self, after: Ranks, *, uncounted: bool, replaced: Mapping[int, int] | None = None
    ) -> None:
        """Go on with other workers; as for a Course."""
        self.version += 1
        lost = [rank for rank in self.members if rank not in after]
        again = self._uncounted(lost) if uncounted else {}
        self.reissued += sum(map(len, again.values()))
        if replaced:
            self._rename(replaced)
        if self.members == after:
            return
        readings = self._left(again)
        kept = [stage for stage in self.stages if stage.first < self.taken]
        needed = bisect_right(kept, self.committed, key=lambda stage: stage.first) - 1
        self.stages = [*kept[max(0, needed) :], ReadingStage(self.taken, after, readings)]
        self.batches = {}

    def place(self, batch: int) -> dict[str, Any]:
        """Return what is left from a batch on, the next one of all workers, as plain data: how to
        read on with as many workers as now, and what is `left` for any other number of them."""
        return {
            "stage": _plain(self.stage(batch)),
            "batches": list(self.batches.items()),
            "left": _plain(ReadingStage(batch, self.members, self._left({}))),
            "sources": self._num_sources,
        }

    def begin_at(self, batch: int, place: Mapping[str, Any], *, is_same: bool) -> None:
        """Begin there. With the same workers as then (`is_same`) the stage of that batch is read
        from where it began, so that the batches are the same as well."""
        if place["sources"] != self._num_sources:
            raise DataError(
                f"pl.shard: num_workers is {self._num_sources}, expected {place['sources']} as in"
                " the checkpoint, which was made in the middle of a pass over this stream; each"
                " process of the loader reads a stream of its own"
            )
        stage = _stage(place["stage"] if is_same else place["left"])
        self.stages = [replace(stage, members=self.stages[-1].members)]
        self.batches = dict(place["batches"]) if is_same else {}
        self.taken = self.committed = batch

    def _left(self, again: Mapping[int, list[int]]) -> dict[int, Reading]:
        """Return by source what nobody has taken, and some positions besides."""
        last = self.stages[-1]
        size = self._per_step(len(last.members))
        return {
            source: last.reading(source).without(
                size * self.batches.get(source, 0), again.get(source, [])
            )
            for source in {*last.readings, *self.batches}
        }

    def _uncounted(self, ranks: list[int]) -> dict[int, list[int]]:
        """Return by source the positions that these workers were given since the last commit."""
        again: dict[int, list[int]] = {}
        for _, stage, source, number in self._given:
            for rank in set(ranks) & set(stage.members):
                numbers = self._numbers(stage, number, rank)
                again.setdefault(source, []).extend(map(stage.reading(source).position, numbers))
        return again

    def _numbers(self, stage: ReadingStage, batch: int, rank: int) -> range:
        workers = len(stage.members)
        size = self._per_step(workers)
        return range(batch * size + stage.members.index(rank), (batch + 1) * size, workers)

    def _rename(self, replaced: Mapping[int, int]) -> None:
        names = {
            id(stage): replace(stage, members=tuple(replaced.get(r, r) for r in stage.members))
            for stage in (*self.stages, *(given[1] for given in self._given))
        }
        self.stages = [names[id(stage)] for stage in self.stages]
        self._given = [
            (batch, names[id(stage)], source, number)
            for batch, stage, source, number in self._given
        ]

    def pack(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "stages": list(map(_plain, self.stages)),
            "given": [[batch, _plain(stage), *rest] for batch, stage, *rest in self._given],
            "batches": list(self.batches.items()),
            "taken": self.taken,
            "committed": self.committed,
            "counts": list(self.counts.items()),
            "reissued": self.reissued,
        }

    def load(self, told: Mapping[str, Any]) -> None:
        """Take over what another worker packed."""
        self.version += 1
        self.stages = list(map(_stage, told["stages"]))
        self._given = [
            (batch, _stage(stage), source, number) for batch, stage, source, number in told["given"]
        ]
        self.batches = dict(told["batches"])
        self.taken, self.committed = told["taken"], told["committed"]
        self.counts = dict(told["counts"])
        self.reissued = told["reissued"]


def _plain(stage: ReadingStage) -> list[Any]:
    readings = [[source, list(r.passed), r.base] for source, r in stage.readings.items()]
    return [stage.first, list(stage.members), readings]


def _stage(plain: list[Any]) -> ReadingStage:
    first, members, readings = plain
    read = {source: Reading(tuple(passed), base) for source, passed, base in readings}
    return ReadingStage(first, tuple(members), read)
