"""The cursor of a pass over a stream: which positions have not been used. Arithmetic only.

A stream can only be read from its beginning, and its length is not known. UNREAD POSITIONS are the
positions that have not been used: some that were passed, because a worker was lost before they
counted, and all from a certain position on. After a change every worker reads the stream again,
skips used positions, and strides over the rest, which gets new numbers.

A loader with processes of its own has one stream in each process: its SOURCES, whose batches
alternate. What remains when a batch range begins is the unread positions of each source. Sources
that are not named are completely unread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.data.cursor.cursor import BatchRange, Cursor, Plain, Ranks
from paceline.errors import DataError


@dataclass(frozen=True)
class UnreadPositions:
    """What remains of a stream. The numbers 0, 1, ... count its unread positions."""

    passed: tuple[int, ...] = ()  # positions below `base`
    base: int = 0

    def position(self, number: int) -> int:
        """Return the position in the stream."""
        beyond = number - len(self.passed)
        return self.passed[number] if beyond < 0 else self.base + beyond

    def numbering(self) -> Callable[[int], int | None]:
        """Return a function from positions to numbers; None for used positions."""
        numbers = {position: number for number, position in enumerate(self.passed)}
        shift, base = len(self.passed) - self.base, self.base
        return lambda at: at + shift if at >= base else numbers.get(at)

    def without(self, count: int, again: list[int]) -> UnreadPositions:
        """Return what remains after the first `count` were used, plus the positions `again`."""
        base = self.base + max(0, count - len(self.passed))
        return UnreadPositions(tuple(sorted((*self.passed[count:], *again))), base)


def unread_in(batch_range: BatchRange, source: int) -> UnreadPositions:
    """Return what remained of a source when a batch range began."""
    remaining: Mapping[int, UnreadPositions] = batch_range.remaining
    return remaining.get(source, UnreadPositions())


class StreamCursor(Cursor):
    """Progress of a pass over a stream. `per_step`: samples of a batch, by number of workers."""

    def __init__(
        self, per_step: Callable[[int], int], members: Ranks, num_sources: int = 1
    ) -> None:
        super().__init__(members)
        self._per_step, self._num_sources = per_step, num_sources
        self._batches: dict[int, int] = {}  # by source: batches of this range so far
        self._given: list[tuple[int, int, int]] = []  # uncommitted: batch, source, number there
        self._reassigned = 0

    @property
    def reassigned(self) -> int:
        """How many samples were used again."""
        return self._reassigned

    def take(self, batch: int, source: int = 0) -> None:
        """Note that a batch was handed out, and from which source."""
        if batch < self.taken:
            return  # other workers had taken it before
        number = self._batches.get(source, 0)
        self._given.append((batch, source, number))
        self._batches[source] = number + 1
        self.taken = batch + 1

    def use(self, batch: int, source: int = 0) -> None:
        """Note that a batch was handed out and counts, because no worker can be lost."""
        self._batches[source] = self._batches.get(source, 0) + 1
        super().use(batch)

    def commit(self, batches: int) -> None:
        """Note that so many batches have counted."""
        super().commit(batches)
        self._given = [given for given in self._given if given[0] >= self.committed]

    def _uncommitted_of(self, ranks: list[int]) -> dict[int, list[int]]:
        """Return by source the positions that these workers received since the last commit."""
        again: dict[int, list[int]] = {}
        for batch, source, number in self._given:
            batch_range = self.range_of(batch)
            workers = len(batch_range.members)
            size, unread = self._per_step(workers), unread_in(batch_range, source)
            for rank in set(ranks) & set(batch_range.members):
                first = number * size + batch_range.members.index(rank)
                numbers = range(first, (number + 1) * size, workers)
                again.setdefault(source, []).extend(map(unread.position, numbers))
        return again

    # -- what remains -------------------------------------------------------------------------

    def _all_remaining(self) -> dict[int, UnreadPositions]:
        return {}

    def _remaining_after(self, lost: list[int]) -> tuple[dict[int, UnreadPositions], bool]:
        again = self._uncommitted_of(lost)
        self._reassigned += sum(map(len, again.values()))
        return self._unread(again), bool(again)

    def _unread(self, again: Mapping[int, list[int]]) -> dict[int, UnreadPositions]:
        """Return by source what no worker has taken, plus the positions `again`."""
        last = self.ranges[-1]
        size = self._per_step(len(last.members))
        return {
            source: unread_in(last, source).without(
                size * self._batches.get(source, 0), again.get(source, [])
            )
            for source in {*last.remaining, *self._batches}
        }

    def _begin_range(self) -> None:
        self._batches = {}

    def _remaining_state(self) -> dict[str, Any]:
        """Return how to continue with as many workers as now, and what is `left` for any other
        number of workers."""
        return {
            "stage": self._flat(self.range_of(self.position)),
            "batches": list(self._batches.items()),
            "left": self._flat(BatchRange(self.position, self.members, self._unread({}))),
            "sources": self._num_sources,
        }

    def _load_remaining(self, batch: int, rest: Plain, *, has_same_world_size: bool) -> None:  # noqa: ARG002
        """With as many workers as before, the range is read from where it began, so that the
        batches are the same as well."""
        if rest["sources"] != self._num_sources:
            raise DataError(
                f"pl.shard: num_workers is {self._num_sources}, expected {rest['sources']} as in"
                " the checkpoint, which was saved in the middle of a pass over this stream; each"
                " process of the loader reads a stream of its own: use the same num_workers, or"
                " resume from a checkpoint between two epochs"
            )
        first, _, remaining = rest["stage"] if has_same_world_size else rest["left"]
        self.ranges = [BatchRange(first, self.members, self._decode_remaining(remaining))]
        self._batches = dict(rest["batches"]) if has_same_world_size else {}

    def _live_details(self) -> dict[str, Any]:
        return {
            "given": list(map(list, self._given)),
            "batches": list(map(list, self._batches.items())),
            "reissued": self._reassigned,
        }

    def _load_live_details(self, live: Plain) -> None:
        self._given = [(batch, source, number) for batch, source, number in live["given"]]
        self._batches = dict(live["batches"])
        self._reassigned = live["reissued"]

    def _flat(self, one: BatchRange) -> list[Any]:
        return [one.first, list(one.members), self._encode_remaining(one.remaining)]

    def _encode_remaining(self, remaining: Mapping[int, UnreadPositions]) -> list[Any]:
        return [[source, list(r.passed), r.base] for source, r in remaining.items()]

    def _decode_remaining(self, remaining: list[Any]) -> dict[int, UnreadPositions]:
        return {source: UnreadPositions(tuple(passed), base) for source, passed, base in remaining}
