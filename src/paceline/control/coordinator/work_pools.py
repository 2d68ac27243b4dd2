"""Pools of work: portions that whoever is free may take, each of them once.

A POOL is one pass over some data, cut into PORTIONS by those who work on it; the coordinator knows
only how many there are. A member takes a portion, which is then LENT to it, and says later that it
is done. Portions of a member that is gone come back, and are lent AGAIN to whoever asks next. So
each portion is done once while nobody is lost; behind that, at least once: what a lost member had
done and not said.

Pools are named by a LINE (a loader of the script) and the INDEX of the pass over it. Of each line
the last few are kept; earlier ones are over, whoever asks for them.

Everything that happens is an entry, which is noted (in the journal) before it is answered; a
coordinator that is started again takes in the same entries. Not thread-safe: one loop or lock owns
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.control.coordinator.journal import Closed, Lending, Pooled, PoolEntry, Unlent
from paceline.control.transport import messages as m
from paceline.errors import UsageError

MAX_PORTIONS = 1 << 32
_MAX_NAME = 200
_MAX_DONE = 1 << 16  # in one message
_MAX_LINES = 100_000
_KEPT = 16  # pools of each line


@dataclass
class Pool:
    """The portions of one pass. Done are those below `start` that are neither lent nor back, and
    those that were done `before`, by an earlier job whose checkpoint this one goes on from."""

    portions: int
    start: int = 0  # the first that nobody has had
    lent: dict[int, int] = field(default_factory=dict)  # by portion: to which rank
    back: deque[int] = field(default_factory=deque)
    again: list[int] = field(default_factory=list)  # portions that came back
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)  # by rank: request, portion
    before: set[int] = field(default_factory=set)

    def next_portion(self) -> int:
        """Return the one that comes next; -1: there is none now."""
        if self.back:
            return self.back[0]
        first = self.start
        while first in self.before:
            first += 1
        return first if first < self.portions else -1

    def lend(self, portion: int, rank: int) -> None:
        """Give a portion away."""
        if portion >= self.start:
            self.start = portion + 1  # those in between were done before
        else:
            self.back.remove(portion)
        self.lent[portion] = rank

    def settle(self, rank: int, done: tuple[int, ...]) -> None:
        """Note that portions are done; those that were taken away meanwhile are somebody else's."""
        for portion in done:
            if self.lent.get(portion) == rank:
                del self.lent[portion]

    def give_back(self, portions: list[int]) -> None:
        """Have portions done by somebody else."""
        for portion in portions:
            del self.lent[portion]
        self.back.extend(portions)
        self.again += portions

    def of(self, rank: int) -> list[int]:
        """Return what a member has."""
        return sorted(portion for portion, holder in self.lent.items() if holder == rank)

    def done(self) -> tuple[tuple[int, int], ...]:
        """Return the portions that are done, as ranges."""
        gaps = {*self.lent, *self.back}
        found = [portion for portion in range(self.start) if portion not in gaps]
        return _ranges([*found, *(p for p in self.before if p >= self.start)])


class Pools:
    """All pools of a job."""

    def __init__(self) -> None:
        self.note: Callable[[PoolEntry], None] = lambda _: None
        self._lines: dict[str, dict[int, Pool]] = {}
        self._floors: dict[str, int] = {}  # by line: passes below this are over

    def take(self, rank: int, request: m.TakePortion) -> m.Lent:
        """Lend the next portion; what is asked again with the same id is answered alike."""
        pool = self._pool(rank, request)
        if pool is None:
            return m.Lent(request.id, -1, 0, 0)
        _check(request.done, pool)
        _check([edge for start, stop in request.before for edge in (start, stop - 1)], pool)
        if pool.answers.get(rank, (None, 0))[0] != request.id:
            place = (request.line, request.index, rank)
            if request.before:
                self._happen(Lending(*place, 0, -1, before=request.before))
            self._happen(Lending(*place, request.id, pool.next_portion(), request.done))
        others = sum(holder != rank for holder in pool.lent.values())
        return m.Lent(request.id, pool.answers[rank][1], others + len(pool.back), len(pool.again))

    def settle(self, rank: int, message: m.SettlePortions) -> None:
        """Take in that portions are done, or will not be."""
        pool = self._lines.get(message.line, {}).get(message.index)
        if pool is None:
            return
        _check(message.done, pool)
        _check(message.back, pool)
        self._happen(Lending(message.line, message.index, rank, 0, -1, message.done, message.back))

    def look(self, request: m.LookAtPool) -> m.PoolState:
        """Say how far a pass is; nothing is known of one that has not begun, or is long over."""
        pool = self._lines.get(request.line, {}).get(request.index)
        if pool is None:
            return m.PoolState(request.id, 0, (), ())
        return m.PoolState(request.id, pool.portions, pool.done(), tuple(pool.again))

    def release(self, rank: int) -> None:
        """A member is gone: lend what it had to others."""
        if any(pool.of(rank) or rank in pool.answers for pool in self._all()):
            self._happen(Unlent(rank))

    def replay(self, entry: PoolEntry) -> None:
        """Take in what happened, now or in an earlier life."""
        if isinstance(entry, Closed):
            self._floors[entry.line] = entry.below
            pools = self._lines.setdefault(entry.line, {})
            self._lines[entry.line] = {i: pool for i, pool in pools.items() if i >= entry.below}
        elif isinstance(entry, Pooled):
            self._lines.setdefault(entry.line, {})[entry.index] = Pool(
                entry.portions,
                entry.start,
                dict(entry.lent),
                deque(entry.back),
                list(entry.again),
                {rank: (request, portion) for rank, request, portion in entry.answers},
                {portion for start, stop in entry.before for portion in range(start, stop)},
            )
        elif isinstance(entry, Unlent):
            for pool in self._all():
                pool.give_back(pool.of(entry.rank))
                pool.answers.pop(entry.rank, None)
        else:
            self._lend(entry)

    def entries(self) -> Iterator[PoolEntry]:
        """Everything that a successor must know, in short."""
        for line, floor in self._floors.items():
            yield Closed(line, floor)
        for line, pools in self._lines.items():
            for index, pool in pools.items():
                yield Pooled(
                    line,
                    index,
                    pool.portions,
                    pool.start,
                    tuple(pool.lent.items()),
                    tuple(pool.back),
                    tuple(pool.again),
                    tuple((rank, *answer) for rank, answer in pool.answers.items()),
                    _ranges(pool.before),
                )

    def _lend(self, entry: Lending) -> None:
        pool = self._lines[entry.line][entry.index]
        pool.before.update(p for start, stop in entry.before for p in range(start, stop))
        pool.settle(entry.rank, entry.done)
        pool.give_back([p for p in entry.back if pool.lent.get(p) == entry.rank])
        if entry.request:
            if entry.portion >= 0:
                pool.lend(entry.portion, entry.rank)
            pool.answers[entry.rank] = (entry.request, entry.portion)

    def _happen(self, entry: PoolEntry) -> None:
        self.note(entry)
        self.replay(entry)

    def _pool(self, rank: int, request: m.TakePortion) -> Pool | None:
        """Return the pool of a request, which may be the first one for it; None: it is over."""
        line, index = request.line, request.index
        if not 0 < len(line) <= _MAX_NAME or index < 0 or not 0 < request.portions <= MAX_PORTIONS:
            raise UsageError(
                f"rank {rank} asked for a portion of pool {line[:_MAX_NAME]!r}, pass {index}, of"
                f" {request.portions} portions: there is no such pool"
            )
        if index < self._floors.get(line, 0):
            return None
        pools = self._lines.get(line, {})
        if index not in pools:
            if line not in self._lines and len(self._lines) >= _MAX_LINES:
                raise UsageError(f"rank {rank}: more than {_MAX_LINES} loaders; make them once")
            self._happen(Pooled(line, index, request.portions))
            pools = self._lines[line]
            if len(pools) > _KEPT:
                self._happen(Closed(line, min(pools) + 1))
                return self._lines[line].get(index)
        pool = pools[index]
        if pool.portions != request.portions:
            raise UsageError(
                f"rank {rank} has cut pass {index} of {line} into {request.portions} portions,"
                f" expected {pool.portions} as the others have; use the same data and settings on"
                " all workers"
            )
        return pool

    def _all(self) -> Iterator[Pool]:
        for pools in self._lines.values():
            yield from pools.values()


def _ranges(portions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Write numbers as ranges, in order."""
    found: list[tuple[int, int]] = []
    for portion in sorted(portions):
        if found and found[-1][1] == portion:
            found[-1] = (found[-1][0], portion + 1)
        else:
            found.append((portion, portion + 1))
    return tuple(found)


def _check(portions: Sequence[int], pool: Pool) -> None:
    if len(portions) > _MAX_DONE or any(not 0 <= portion < pool.portions for portion in portions):
        raise UsageError(
            f"{len(portions)} portions of a pool of {pool.portions}, {portions[:3]}...: there are"
            " no such portions"
        )
