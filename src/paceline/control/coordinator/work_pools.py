"""Work pools: portions of a pass over some data, each leased to the next worker that asks.

A POOL is one pass over some data, which the workers have split into PORTIONS; the coordinator knows
only how many there are. A member leases a portion and reports later that it is done. If a member is
gone, its portions are returned and leased AGAIN to the next member that asks. So each portion is
done once while no member is lost. After a loss it is done at least once: the lost member may have
done portions that it had not reported. A member that leaves as planned says how many parts of a
portion it has done; the next one begins after them, and nothing is done twice.

A pool is named by a LINE (a loader of the script) and the INDEX of the pass over it. The last few
pools of each line are kept; earlier ones are over, whichever member asks for them.

Every event is an entry, which is noted in the journal before it is answered. A restarted
coordinator replays the same entries. Not thread-safe: one loop or lock owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import msgspec

from paceline.control import messages as m
from paceline.errors import UsageError

MAX_PORTIONS = 1 << 32
_MAX_NAME = 200
_MAX_DONE = 1 << 16  # in one message
_MAX_LINES = 100_000
_KEPT = 16  # pools of each line


class Pooled(msgspec.Struct, frozen=True, tag=True):
    """Journal entry: the full state of a pool; at its start no portion is leased."""

    line: str
    index: int
    portions: int
    start: int = 0
    lent: tuple[tuple[int, int], ...] = ()  # portion, rank
    back: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    answers: tuple[tuple[int, int, int], ...] = ()  # rank, request, portion
    before: tuple[tuple[int, int], ...] = ()
    begun: tuple[tuple[int, int], ...] = ()


class Lending(msgspec.Struct, frozen=True, tag=True):
    """Journal entry: a member has done or returned portions, and leased another one."""

    line: str
    index: int
    rank: int
    request: int  # 0: it did not ask for one
    portion: int  # -1: there was none
    done: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    before: tuple[tuple[int, int], ...] = ()  # ranges that an earlier job has done
    begun: tuple[tuple[int, int], ...] = ()  # returned: portion, and parts of it that are done


class Unlent(msgspec.Struct, frozen=True, tag=True):
    """Journal entry: a member is gone, and its portions are returned."""

    rank: int


class PoolsClosed(msgspec.Struct, frozen=True, tag="Closed"):
    """Journal entry: passes below this one are over."""

    line: str
    below: int


PoolEntry: TypeAlias = Pooled | Lending | Unlent | PoolsClosed


@dataclass
class WorkPool:
    """The portions of one pass. Done are those below `start` that are neither leased nor returned,
    and those that were done `before`, by an earlier job from whose checkpoint this one resumed."""

    portions: int
    start: int = 0  # the first that was never leased
    leased: dict[int, int] = field(default_factory=dict)  # by portion: to which rank
    returned: deque[int] = field(default_factory=deque)
    again: list[int] = field(default_factory=list)  # all portions that were ever returned
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)  # by rank: request, portion
    before: tuple[tuple[int, int], ...] = ()  # ranges, in order and apart: there may be 2**32
    begun: dict[int, int] = field(default_factory=dict)  # by portion: parts of it that are done

    def next_portion(self) -> int:
        """Return the next portion to lease; -1: there is none now."""
        if self.returned:
            return self.returned[0]
        first = self.start
        for start, stop in self.before:
            if start <= first < stop:
                first = stop
        return first if first < self.portions else -1

    def lease(self, portion: int, rank: int) -> None:
        """Lease a portion to a member."""
        if portion >= self.start:
            self.start = portion + 1  # those in between were done before
        else:
            self.returned.remove(portion)
        self.leased[portion] = rank

    def complete(self, rank: int, done: tuple[int, ...]) -> None:
        """Note that portions are done, unless they are leased to another member by now."""
        for portion in done:
            if self.leased.get(portion) == rank:
                del self.leased[portion]
                self.begun.pop(portion, None)

    def give_back(self, portions: list[int]) -> None:
        """Return portions, to be leased to another member."""
        for portion in portions:
            del self.leased[portion]
        self.returned.extend(portions)
        self.again += portions

    def give_back_rest(self, rank: int, begun: Iterable[tuple[int, int]]) -> None:
        """Return portions of a member that leaves, with the number of parts that it has done."""
        for portion, parts in begun:
            if self.leased.get(portion) == rank:
                del self.leased[portion]
                self.returned.append(portion)
                self.begun[portion] = parts

    def of(self, rank: int) -> list[int]:
        """Return the portions that are leased to a member."""
        return sorted(portion for portion, holder in self.leased.items() if holder == rank)

    def done(self) -> tuple[tuple[int, int], ...]:
        """Return the portions that are done, as ranges."""
        edges = [-1, *sorted({*self.leased, *self.returned}), self.start]
        found = [(gap + 1, end) for gap, end in pairwise(edges)]
        return merged([*found, *((max(a, self.start), b) for a, b in self.before)])


class WorkPools:
    """All pools of a job."""

    def __init__(self) -> None:
        self.note: Callable[[PoolEntry], None] = lambda _: None
        self._lines: dict[str, dict[int, WorkPool]] = {}
        self._floors: dict[str, int] = {}  # by line: passes below this are over

    def take(self, rank: int, request: m.TakePortion) -> m.Lent:
        """Lease the next portion; a repeated request with the same id gets the same answer."""
        pool = self._pool(rank, request)
        if pool is None:
            return m.Lent(request.id, -1, 0, 0)
        _check(request.done, pool)
        _check([edge for start, stop in request.before for edge in (start, stop - 1)], pool)
        if pool.answers.get(rank, (None, 0))[0] != request.id:
            lessee = (request.line, request.index, rank)
            if request.before:
                self._record(Lending(*lessee, 0, -1, before=request.before))
            self._record(Lending(*lessee, request.id, pool.next_portion(), request.done))
        missing = sum(holder != rank for holder in pool.leased.values()) + len(pool.returned)
        portion = pool.answers[rank][1]
        return m.Lent(request.id, portion, missing, len(pool.again), pool.begun.get(portion, 0))

    def settle(self, rank: int, message: m.SettlePortions) -> None:
        """Note that a member has done portions, or returns them."""
        pool = self._lines.get(message.line, {}).get(message.index)
        if pool is None:
            return
        _check(message.done, pool)
        _check(message.back, pool)
        _check([portion for portion, _ in message.begun], pool)
        if any(not 0 <= parts <= _MAX_DONE for _, parts in message.begun):
            raise UsageError(f"rank {rank} has done a number of parts that no portion has")
        lessee = (message.line, message.index, rank)
        entry = Lending(*lessee, 0, -1, message.done, message.back, begun=message.begun)
        self._record(entry)

    def look(self, request: m.LookAtPool) -> m.PoolState:
        """Return the progress of a pass; an empty one if it has not begun, or ended long ago."""
        pool = self._lines.get(request.line, {}).get(request.index)
        if pool is None:
            return m.PoolState(request.id, 0, (), ())
        return m.PoolState(request.id, pool.portions, pool.done(), tuple(pool.again))

    def release(self, rank: int) -> None:
        """Return the portions of a member that is gone."""
        if any(pool.of(rank) or rank in pool.answers for pool in self._all()):
            self._record(Unlent(rank))

    def replay(self, entry: PoolEntry) -> None:
        """Apply an entry, of this coordinator or of an earlier one."""
        if isinstance(entry, PoolsClosed):
            self._floors[entry.line] = entry.below
            pools = self._lines.setdefault(entry.line, {})
            self._lines[entry.line] = {i: pool for i, pool in pools.items() if i >= entry.below}
        elif isinstance(entry, Pooled):
            self._lines.setdefault(entry.line, {})[entry.index] = WorkPool(
                entry.portions,
                entry.start,
                dict(entry.lent),
                deque(entry.back),
                list(entry.again),
                {rank: (request, portion) for rank, request, portion in entry.answers},
                merged(entry.before),
                dict(entry.begun),
            )
        elif isinstance(entry, Unlent):
            for pool in self._all():
                pool.give_back(pool.of(entry.rank))
                pool.answers.pop(entry.rank, None)
        else:
            self._lease(entry)

    def entries(self) -> Iterator[PoolEntry]:
        """Yield all that a restarted coordinator must know, in short form."""
        for line, floor in self._floors.items():
            yield PoolsClosed(line, floor)
        for line, pools in self._lines.items():
            for index, pool in pools.items():
                yield Pooled(
                    line,
                    index,
                    pool.portions,
                    pool.start,
                    tuple(pool.leased.items()),
                    tuple(pool.returned),
                    tuple(pool.again),
                    tuple((rank, *answer) for rank, answer in pool.answers.items()),
                    pool.before,
                    tuple(pool.begun.items()),
                )

    def _lease(self, entry: Lending) -> None:
        pool = self._lines[entry.line][entry.index]
        pool.before = merged([*pool.before, *entry.before])
        pool.complete(entry.rank, entry.done)
        back = dict.fromkeys(entry.back)  # each once
        pool.give_back([p for p in back if pool.leased.get(p) == entry.rank])
        pool.give_back_rest(entry.rank, entry.begun)
        if entry.request:
            if entry.portion >= 0:
                pool.lease(entry.portion, entry.rank)
            pool.answers[entry.rank] = (entry.request, entry.portion)

    def _record(self, entry: PoolEntry) -> None:
        self.note(entry)
        self.replay(entry)

    def _pool(self, rank: int, request: m.TakePortion) -> WorkPool | None:
        """Return the pool of a request, made if this is its first request; None: it is over."""
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
            self._record(Pooled(line, index, request.portions))
            pools = self._lines[line]
            if len(pools) > _KEPT:
                self._record(PoolsClosed(line, min(pools) + 1))
                return self._lines[line].get(index)
        pool = pools[index]
        if pool.portions != request.portions:
            raise UsageError(
                f"rank {rank} has split pass {index} of {line} into {request.portions} portions,"
                f" expected {pool.portions} as on the other workers; use the same data and settings"
                " on all workers"
            )
        return pool

    def _all(self) -> Iterator[WorkPool]:
        for pools in self._lines.values():
            yield from pools.values()


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges in order, without empty ones; those that touch or overlap become one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and found[-1][1] >= start:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def _check(portions: Sequence[int], pool: WorkPool) -> None:
    if len(portions) > _MAX_DONE or any(not 0 <= portion < pool.portions for portion in portions):
        raise UsageError(
            f"{len(portions)} portions of a pool of {pool.portions}, {portions[:3]}...: there are"
            " no such portions"
        )
