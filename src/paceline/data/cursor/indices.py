"""The cursor of a pass over samples with indices: an order of units, followed by a queue.

A pass is a sequence of units: its order, followed by a QUEUE of units that are used again because a
worker was lost before they counted. What remains when a batch range begins is an index in that
sequence. Arithmetic only, no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.data.cursor.cursor import BatchRange, Cursor, Plain, Ranks
from paceline.data.split.order import SamplerOrder, to_plain_index
from paceline.data.split.weights import Cut, Units, counted, size_of
from paceline.state.serializer import unflatten_state


class Sequence(Protocol):
    """The units of a pass. Units that have been prepared can be read any number of times."""

    @property
    def length(self) -> int | None:
        """How many there are, once that is known."""

    def units(self, start: int, stop: int) -> Units:
        """Return units; fewer, or none, at the end."""


@dataclass(frozen=True)
class Rules:
    """How units are split into parts, for any number of workers."""

    per_step: Callable[[int], int]  # units of a global batch, by the number of workers
    cut: Cut
    drop_short: bool
    again: Callable[[Any], list[Any]]  # a part as units


class IndexCursor(Cursor):
    """Progress of a pass over indices, and the parts of each worker."""

    def __init__(self, rules: Rules, sequence: Sequence, members: Ranks) -> None:
        super().__init__(members)
        self._rules, self._sequence = rules, sequence
        self.order = sequence if isinstance(sequence, SamplerOrder) else None
        self.queue: list[Any] = []

    @property
    def reassigned(self) -> int:
        """How many samples were queued again."""
        return sum(map(size_of, self.queue))

    def dropped(self, samples: int) -> int:
        """Return how many samples a finished pass left out, given how many it handed out."""
        if not self._rules.drop_short or self._sequence.length is None:
            return 0
        return self._sequence.length + len(self.queue) - samples

    def span(self, batch: int) -> tuple[int, int]:
        """Return where the units of a batch begin and end."""
        found, following = self._find_range(batch)
        assert batch >= found.first, "committed batches are not needed again"
        size = self._rules.per_step(len(found.members))
        start = found.remaining + (batch - found.first) * size
        stop = start + size
        return start, stop if following is None else min(stop, following.remaining)

    def units(self, batch: int) -> Units | None:
        """Return the units of a global batch; None after the last one."""
        start, stop = self.span(batch)
        units = self._sequence.units(start, stop)
        if len(units) < stop - start:
            end = self._sequence.length
            assert end is not None, "a sequence that returns fewer units has ended"
            units = [*units, *self.queue[max(0, start - end) : max(0, stop - end)]]
        is_short = len(units) < self._rules.per_step(len(self.range_of(batch).members))
        return None if not len(units) or (is_short and self._rules.drop_short) else units

    def part(self, batch: int, rank: int) -> tuple[Any, float] | None:
        """Return a worker's part of a batch and its weight; None after the last batch."""
        units = self.units(batch)
        return None if units is None else self.cut(batch, units, rank)

    def cut(self, batch: int, units: Units, rank: int) -> tuple[Any, float]:
        """Return a worker's part of a batch with these units, and its weight."""
        members = self.range_of(batch).members
        if rank in members:
            return self._rules.cut(units, len(members), members.index(rank))
        # This worker joined after the others had taken the batch, and one of them was lost. It
        # takes part in the step with weight 0.
        return self._rules.cut(units, len(members), 0)[0], 0.0

    def counted(self, batch: int, units: Units) -> tuple[int, int]:
        """Return how many samples a batch has, and how many workers get none of it."""
        return counted(units, self._rules.cut, len(self.range_of(batch).members))

    def uncommitted(self) -> dict[int, list[Any]]:
        """Return by rank the units that were handed out and have not counted."""
        ranks = {rank for one in self.ranges for rank in one.members}
        parts = {rank: self._uncommitted_of([rank]) for rank in sorted(ranks)}
        return {rank: units for rank, units in parts.items() if units}

    def requeue(self, units: list[Any]) -> None:
        """Use units again that lost workers had received at the end of the pass before."""
        self.queue += units
        self.version += bool(units)

    def _uncommitted_of(self, ranks: Collection[int]) -> list[Any]:
        units = [unit for rank in ranks for unit in self.carried.pop(rank, ())]
        for batch in range(self.committed, self.taken):
            for rank in self.range_of(batch).members:
                part = self.part(batch, rank) if rank in ranks else None
                if part is not None and part[1] > 0.0:
                    units += self._rules.again(part[0])
        return units

    # -- what remains -------------------------------------------------------------------------

    def _all_remaining(self) -> int:
        return 0

    def _remaining_after(self, lost: list[int]) -> tuple[int, bool]:
        start = self._start_of(self.taken)  # before the queue grows
        again = self._uncommitted_of(lost)
        self.queue += again
        return start, bool(again)

    def _start_of(self, batch: int) -> int:
        """Return where a batch begins; the end, if the batch before it was short."""
        start, end = self.span(batch)[0], self._sequence.length
        return start if end is None else min(start, end + len(self.queue))

    def _remaining_state(self) -> dict[str, Any]:
        start = self._start_of(self.position)
        return {"start": start, "queue": list(map(to_plain_index, self.queue))}

    def _load_remaining(self, batch: int, rest: Plain, *, has_same_world_size: bool) -> None:  # noqa: ARG002
        size = self._rules.per_step(len(self.members))
        self.ranges = [BatchRange(batch, self.members, rest.get("start", batch * size))]
        self.queue = from_plain_units(rest.get("queue", ()))

    def _live_details(self) -> dict[str, Any]:
        return {
            "queue": list(map(to_plain_index, self.queue)),
            "carried": to_plain_parts(self.carried),
        }

    def _load_live_details(self, live: Plain) -> None:
        self.queue = from_plain_units(live["queue"])
        self.carried = from_plain_parts(live["carried"])


def from_plain_units(units: Collection[Any]) -> list[Any]:
    """Return units from plain data."""
    return [unflatten_state(unit, ()) for unit in units]


def to_plain_parts(parts: Mapping[int, list[Any]]) -> list[Any]:
    """Return units by rank as plain data."""
    return [[rank, list(map(to_plain_index, units))] for rank, units in parts.items()]


def from_plain_parts(parts: list[Any]) -> dict[int, list[Any]]:
    """Undo `to_plain_parts`."""
    return {rank: from_plain_units(units) for rank, units in parts}
