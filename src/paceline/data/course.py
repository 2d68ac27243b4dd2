"""The course of one pass while workers come and go: arithmetic, without any communication.

A pass is a sequence of units: its order, and behind that a QUEUE of units to be used again, because
the worker that had them was lost before they counted. Global batches are taken from the sequence
one after the other and cut among the workers. A STAGE is a stretch of global batches with the same
workers; a change begins a new one, at the first batch that nobody has taken yet:

    batches      0 1 2 3 4 | 5 6 7 | 8 9 ...
    stages       workers 0 1 2 | 0 2   | 0 2 7

TAKEN is the number of global batches that some worker has been given (a worker may be behind: the
batches in between are still cut for it as they were for the others), COMMITTED the number of those
that an optimizer step has counted. Workers that tell the same changes to the same course get the
same parts of the same batches; everything here can be told as plain data to one who comes later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from paceline.data.portable import portable, restored
from paceline.data.split import Cut, Units, counted, size_of

Ranks = tuple[int, ...]


class Sequence(Protocol):
    """The units of a pass, of which any that have been prepared can be asked for again."""

    @property
    def length(self) -> int | None:
        """How many there are, once that is known."""

    def units(self, start: int, stop: int) -> Units:
        """Return units; fewer, or none, at the end."""


@dataclass(frozen=True)
class Rules:
    """How units become parts, whoever the workers are."""

    per_step: Callable[[int], int]  # units of a global batch, by the number of workers
    cut: Cut
    drop_short: bool
    again: Callable[[Any], list[Any]]  # a part as units


@dataclass(frozen=True)
class Stage:
    """Global batches with the same workers."""

    first: int  # batch
    start: int  # unit
    members: Ranks  # ordered by number


class Course:
    """How far a pass is, and whose part is what."""

    def __init__(self, rules: Rules, sequence: Sequence, members: Ranks) -> None:
        self._rules, self._sequence = rules, sequence
        self.stages = [Stage(0, 0, members)]
        self.queue: list[Any] = []
        self.taken = 0
        self.committed = 0
        self.carried: dict[int, list[Any]] = {}  # by rank: of the pass before, not committed yet
        self.version = 0  # grows when batches that were not taken yet may have changed

    @property
    def reissued(self) -> int:
        """How many samples were queued again."""
        return sum(map(size_of, self.queue))

    def dropped(self, samples: int) -> int:
        """Return how many samples were left out, at the end of a pass in which so many were not."""
        if not self._rules.drop_short or self._sequence.length is None:
            return 0
        return self._sequence.length + len(self.queue) - samples

    @property
    def members(self) -> Ranks:
        return self.stages[-1].members

    def stage_of(self, batch: int) -> int:
        """Return the first batch of the stage to which a batch belongs."""
        return self._stage(batch)[0].first

    def span(self, batch: int) -> tuple[int, int]:
        """Return where the units of a batch begin and end."""
        stage, following = self._stage(batch)
        size = self._rules.per_step(len(stage.members))
        start = stage.start + (batch - stage.first) * size
        stop = start + size
        return start, stop if following is None else min(stop, following.start)

    def units(self, batch: int) -> Units | None:
        """Return the units of a global batch; None behind the last one."""
        start, stop = self.span(batch)
        units = self._sequence.units(start, stop)
        if len(units) < stop - start:
            end = self._sequence.length
            assert end is not None, "a sequence that gives fewer units has come to its end"
            units = [*units, *self.queue[max(0, start - end) : max(0, stop - end)]]
        is_short = len(units) < self._rules.per_step(len(self._stage(batch)[0].members))
        return None if not len(units) or (is_short and self._rules.drop_short) else units

    def part(self, batch: int, rank: int) -> tuple[Any, float] | None:
        """Return a worker's part of a batch and its weight; None behind the last batch."""
        units = self.units(batch)
        return None if units is None else self.cut(batch, units, rank)

    def cut(self, batch: int, units: Units, rank: int) -> tuple[Any, float]:
        """The same, of a batch with these units."""
        members = self._stage(batch)[0].members
        if rank in members:
            return self._rules.cut(units, len(members), members.index(rank))
        # It came when the others had this batch already, and one of them was lost: it takes part in
        # that step, but with nothing.
        return self._rules.cut(units, len(members), 0)[0], 0.0

    def counted(self, batch: int, units: Units) -> tuple[int, int]:
        """Return how many samples a batch has, and how many workers get none of it."""
        return counted(units, self._rules.cut, len(self._stage(batch)[0].members))

    def take(self, batch: int) -> None:
        """Note that a batch has been given out."""
        self.taken = max(self.taken, batch + 1)

    def commit(self, batches: int) -> None:
        """Note that so many batches have counted."""
        self.committed = max(self.committed, batches)
        self.carried = {}

    def change(
        self, after: Ranks, *, uncounted: bool, replaced: Mapping[int, int] | None = None
    ) -> None:
        """Go on with other workers. With `uncounted`, what the lost ones were given since the last
        commit is queued again. Those who are `replaced` (by whom) leave their parts to others."""
        start = self._next_start()
        if uncounted:
            lost = [rank for rank in (*self.members, *self.carried) if rank not in after]
            again = self._uncounted(dict.fromkeys(lost))
            self.queue += again
            self.version += bool(again)
        if replaced:
            names = [tuple(replaced.get(r, r) for r in stage.members) for stage in self.stages]
            renamed = zip(self.stages, names, strict=True)
            self.stages = [replace(stage, members=members) for stage, members in renamed]
        if self.members != after:
            kept = [stage for stage in self.stages if stage.first < self.taken]
            needed = bisect_right(kept, self.committed, key=lambda stage: stage.first) - 1
            self.stages = [*kept[max(0, needed) :], Stage(self.taken, start, after)]
            self.version += 1

    def uncommitted(self) -> dict[int, list[Any]]:
        """Return by rank what has been given out and has not counted."""
        ranks = {rank for stage in self.stages for rank in stage.members}
        parts = {rank: self._uncounted([rank]) for rank in sorted(ranks)}
        return {rank: units for rank, units in parts.items() if units}

    def place(self, batch: int) -> dict[str, Any]:
        """Return what is left from a batch on, for a run that begins there, as plain data. All that
        lies before it must have counted."""
        start, end = self.span(batch)[0], self._sequence.length
        if end is not None:
            start = min(start, end + len(self.queue))  # the last batch may have been short
        return {"start": start, "queue": list(map(portable, self.queue))}

    def begin_at(self, batch: int, place: Mapping[str, Any], *, is_same: bool) -> None:  # noqa: ARG002
        """Begin there, with whoever the workers are now."""
        self.stages = [Stage(batch, place["start"], self.members)]
        self.queue = list(map(restored, place["queue"]))
        self.taken = self.committed = batch
        self.version += 1

    def pack(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "stages": [[stage.first, stage.start, list(stage.members)] for stage in self.stages],
            "queue": list(map(portable, self.queue)),
            "carried": [[r, list(map(portable, units))] for r, units in self.carried.items()],
            "taken": self.taken,
            "committed": self.committed,
        }

    def load(self, told: Mapping[str, Any]) -> None:
        """Take over what another worker packed."""
        self.stages = [Stage(first, start, tuple(m)) for first, start, m in told["stages"]]
        self.queue = list(map(restored, told["queue"]))
        self.carried = {rank: list(map(restored, units)) for rank, units in told["carried"]}
        self.taken, self.committed = told["taken"], told["committed"]
        self.version += 1

    def _uncounted(self, ranks: Collection[int]) -> list[Any]:
        units = [unit for rank in ranks for unit in self.carried.pop(rank, ())]
        for batch in range(self.committed, self.taken):
            members = self._stage(batch)[0].members
            for rank in members:
                part = self.part(batch, rank) if rank in ranks else None
                if part is not None and part[1] > 0.0:
                    units += self._rules.again(part[0])
        return units

    def _next_start(self) -> int:
        """Return the first unit that nobody has taken. The last batch may have been short: what is
        queued from now on comes behind it."""
        start, end = self.span(self.taken)[0], self._sequence.length
        return start if end is None else min(start, end + len(self.queue))

    def _stage(self, batch: int) -> tuple[Stage, Stage | None]:
        """Return the stage of a batch and the one behind it."""
        if len(self.stages) == 1 and batch >= self.stages[0].first:  # nearly always
            return self.stages[0], None
        found = bisect_right(self.stages, batch, key=lambda stage: stage.first) - 1
        assert found >= 0, "batches that have counted are not asked for again"
        following = self.stages[found + 1] if found + 1 < len(self.stages) else None
        return self.stages[found], following
