"""The cursor of a pass over samples with indices: the order in units, and a queue after it.

A pass is a sequence of units: its order, followed by a QUEUE of units to be used again, because the
worker that had them was lost before they counted. What is left when a stage begins is a place in
that sequence. Arithmetic, without any communication.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.data.cursor.cursor import Cursor, Plain, Ranks, Stage
from paceline.data.split.order import KeptOrder, portable, restored
from paceline.data.split.weights import Cut, Units, counted, size_of


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


class IndexCursor(Cursor):
    """How far a pass is, and whose part is what."""

    def __init__(self, rules: Rules, sequence: Sequence, members: Ranks) -> None:
        super().__init__(members)
        self._rules, self._sequence = rules, sequence
        self.order = sequence if isinstance(sequence, KeptOrder) else None
        self.queue: list[Any] = []

    @property
    def reissued(self) -> int:
        """How many samples were queued again."""
        return sum(map(size_of, self.queue))

    def dropped(self, samples: int) -> int:
        """Return how many samples were left out, at the end of a pass in which so many were not."""
        if not self._rules.drop_short or self._sequence.length is None:
            return 0
        return self._sequence.length + len(self.queue) - samples

    def span(self, batch: int) -> tuple[int, int]:
        """Return where the units of a batch begin and end."""
        stage, following = self._stage(batch)
        assert batch >= stage.first, "batches that have counted are not asked for again"
        size = self._rules.per_step(len(stage.members))
        start = stage.left + (batch - stage.first) * size
        stop = start + size
        return start, stop if following is None else min(stop, following.left)

    def units(self, batch: int) -> Units | None:
        """Return the units of a global batch; None after the last one."""
        start, stop = self.span(batch)
        units = self._sequence.units(start, stop)
        if len(units) < stop - start:
            end = self._sequence.length
            assert end is not None, "a sequence that gives fewer units has come to its end"
            units = [*units, *self.queue[max(0, start - end) : max(0, stop - end)]]
        is_short = len(units) < self._rules.per_step(len(self.stage(batch).members))
        return None if not len(units) or (is_short and self._rules.drop_short) else units

    def part(self, batch: int, rank: int) -> tuple[Any, float] | None:
        """Return a worker's part of a batch and its weight; None after the last batch."""
        units = self.units(batch)
        return None if units is None else self.cut(batch, units, rank)

    def cut(self, batch: int, units: Units, rank: int) -> tuple[Any, float]:
        """The same, of a batch with these units."""
        members = self.stage(batch).members
        if rank in members:
            return self._rules.cut(units, len(members), members.index(rank))
        # It came when the others had this batch already, and one of them was lost: it takes part in
        # that step, but with nothing.
        return self._rules.cut(units, len(members), 0)[0], 0.0

    def counted(self, batch: int, units: Units) -> tuple[int, int]:
        """Return how many samples a batch has, and how many workers get none of it."""
        return counted(units, self._rules.cut, len(self.stage(batch).members))

    def uncommitted(self) -> dict[int, list[Any]]:
        """Return by rank what has been given out and has not counted."""
        ranks = {rank for stage in self.stages for rank in stage.members}
        parts = {rank: self._uncounted([rank]) for rank in sorted(ranks)}
        return {rank: units for rank, units in parts.items() if units}

    def _uncounted(self, ranks: Collection[int]) -> list[Any]:
        units = [unit for rank in ranks for unit in self.carried.pop(rank, ())]
        for batch in range(self.committed, self.taken):
            for rank in self.stage(batch).members:
                part = self.part(batch, rank) if rank in ranks else None
                if part is not None and part[1] > 0.0:
                    units += self._rules.again(part[0])
        return units

    # -- what is left -------------------------------------------------------------------------

    def _everything(self) -> int:
        return 0

    def _left(self, lost: list[int]) -> tuple[int, bool]:
        start = self._start_of(self.taken)  # what is queued from now on comes after it
        again = self._uncounted(lost)
        self.queue += again
        return start, bool(again)

    def _start_of(self, batch: int) -> int:
        """Return where a batch begins, that is the end if the one before was short."""
        start, end = self.span(batch)[0], self._sequence.length
        return start if end is None else min(start, end + len(self.queue))

    def _rest(self) -> dict[str, Any]:
        start = self._start_of(self.position)
        return {"start": start, "queue": list(map(portable, self.queue))}

    def _begin_at(self, batch: int, rest: Plain, *, is_same: bool) -> None:  # noqa: ARG002
        size = self._rules.per_step(len(self.members))
        self.stages = [Stage(batch, self.members, rest.get("start", batch * size))]
        self.queue = list(map(restored, rest.get("queue", ())))

    def _under_way(self) -> dict[str, Any]:
        return {
            "queue": list(map(portable, self.queue)),
            "carried": plain_parts(self.carried),
        }

    def _take_over(self, live: Plain) -> None:
        self.queue = list(map(restored, live["queue"]))
        self.carried = read_parts(live["carried"])


def plain_parts(parts: Mapping[int, list[Any]]) -> list[Any]:
    """Return units by rank as plain data."""
    return [[rank, list(map(portable, units))] for rank, units in parts.items()]


def read_parts(told: list[Any]) -> dict[int, list[Any]]:
    """Return them again."""
    return {rank: list(map(restored, units)) for rank, units in told}
