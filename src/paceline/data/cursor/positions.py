"""The cursor of a pass over a stream: which positions of it have not been used. Arithmetic only.

A stream can only be read from its beginning, and nobody knows its length. So a READING says which
positions of it have not been used: some that were passed, because the worker that had them was lost
before they counted, and all from a certain one on. After a change every worker reads the stream
again, leaves out what is not in the reading, and strides over the rest, which is numbered anew.

A loader with processes of its own has a stream in each: its SOURCES, whose batches come in turn.
What is left when a stage begins is a reading for each; sources that are not named are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.data.cursor.cursor import Cursor, Plain, Ranks, Stage
from paceline.errors import DataError


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


def reading_of(stage: Stage, source: int) -> Reading:
    """Return what was left of a source when a stage began."""
    left: Mapping[int, Reading] = stage.left
    return left.get(source, Reading())


class StreamCursor(Cursor):
    """How far a pass over a stream is. `per_step`: samples of a batch, by number of workers."""

    def __init__(
        self, per_step: Callable[[int], int], members: Ranks, num_sources: int = 1
    ) -> None:
        super().__init__(members)
        self._per_step, self._num_sources = per_step, num_sources
        self._batches: dict[int, int] = {}  # by source: of this stage, so far
        self._given: list[tuple[int, int, int]] = []  # not counted: batch, source, number there
        self._reissued = 0

    @property
    def reissued(self) -> int:
        """How many samples were used again."""
        return self._reissued

    def take(self, batch: int, source: int = 0) -> None:
        """Note that a batch has been given out, and of which source it is."""
        if batch < self.taken:
            return  # the others were further
        number = self._batches.get(source, 0)
        self._given.append((batch, source, number))
        self._batches[source] = number + 1
        self.taken = batch + 1

    def use(self, batch: int, source: int = 0) -> None:
        """The same where workers stay: nothing of it comes again."""
        self._batches[source] = self._batches.get(source, 0) + 1
        super().use(batch)

    def commit(self, batches: int) -> None:
        """Note that so many batches have counted."""
        super().commit(batches)
        self._given = [given for given in self._given if given[0] >= self.committed]

    def _uncounted(self, ranks: list[int]) -> dict[int, list[int]]:
        """Return by source the positions that these workers were given since the last commit."""
        again: dict[int, list[int]] = {}
        for batch, source, number in self._given:
            stage = self.stage(batch)
            workers = len(stage.members)
            size, reading = self._per_step(workers), reading_of(stage, source)
            for rank in set(ranks) & set(stage.members):
                first = number * size + stage.members.index(rank)
                numbers = range(first, (number + 1) * size, workers)
                again.setdefault(source, []).extend(map(reading.position, numbers))
        return again

    # -- what is left -------------------------------------------------------------------------

    def _everything(self) -> dict[int, Reading]:
        return {}

    def _left(self, lost: list[int]) -> tuple[dict[int, Reading], bool]:
        again = self._uncounted(lost)
        self._reissued += sum(map(len, again.values()))
        return self._readings(again), bool(again)

    def _readings(self, again: Mapping[int, list[int]]) -> dict[int, Reading]:
        """Return by source what nobody has taken, and some positions besides."""
        last = self.stages[-1]
        size = self._per_step(len(last.members))
        return {
            source: reading_of(last, source).without(
                size * self._batches.get(source, 0), again.get(source, [])
            )
            for source in {*last.left, *self._batches}
        }

    def _begin_stage(self) -> None:
        self._batches = {}

    def _rest(self) -> dict[str, Any]:
        """Return how to read on with as many workers as now, and what is `left` for any other
        number of them."""
        return {
            "stage": self._flat(self.stage(self.position)),
            "batches": list(self._batches.items()),
            "left": self._flat(Stage(self.position, self.members, self._readings({}))),
            "sources": self._num_sources,
        }

    def _begin_at(self, batch: int, rest: Plain, *, is_same: bool) -> None:  # noqa: ARG002
        """Begin there. With the same workers as then (`is_same`) the stage of that batch is read
        from where it began, so that the batches are the same as well."""
        if rest["sources"] != self._num_sources:
            raise DataError(
                f"pl.shard: num_workers is {self._num_sources}, expected {rest['sources']} as in"
                " the checkpoint, which was made in the middle of a pass over this stream; each"
                " process of the loader reads a stream of its own"
            )
        first, _, left = rest["stage"] if is_same else rest["left"]
        self.stages = [Stage(first, self.members, self._read(left))]
        self._batches = dict(rest["batches"]) if is_same else {}

    def _under_way(self) -> dict[str, Any]:
        return {
            "given": list(map(list, self._given)),
            "batches": list(map(list, self._batches.items())),
            "reissued": self._reissued,
        }

    def _take_over(self, live: Plain) -> None:
        self._given = [(batch, source, number) for batch, source, number in live["given"]]
        self._batches = dict(live["batches"])
        self._reissued = live["reissued"]

    def _flat(self, stage: Stage) -> list[Any]:
        return [stage.first, list(stage.members), self._plain(stage.left)]

    def _plain(self, left: Mapping[int, Reading]) -> list[Any]:
        return [[source, list(r.passed), r.base] for source, r in left.items()]

    def _read(self, left: list[Any]) -> dict[int, Reading]:
        return {source: Reading(tuple(passed), base) for source, passed, base in left}
