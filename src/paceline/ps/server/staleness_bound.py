"""The consistency rule: which worker may read now, and how stale updates are. Pure; no torch, no
time.

A worker reads the parameters, computes an update from them and has it applied, over and over. Its
CLOCK counts the steps that it finished. The VERSION of a table counts the updates that were applied
to it. A worker is OUTSTANDING from its read until its update is applied. The STALENESS of an
update is the number of versions that other workers made between the two.

One number, the BOUND, decides when a worker may read. None: always. Otherwise by its unit:

unit="clock" (stale synchronous parallel). A worker at clock c may read when every live worker has
    reached clock c - bound. Bound 0 is a barrier. The slowest worker may always read, so there is
    no deadlock. With p workers no update is staler than (p - 1)(2 bound + 1): when a worker
    at clock c reads, another stands at c - bound or later, and it stops at c + bound + 1.

unit="version". No update is staler than the bound. Call n the number of outstanding workers, v the
    version, r_i the version that worker i read. When all the others are applied first, the update
    of i will be as stale as

        limit_i = v + (n - 1) - r_i

    and the rule is: a worker may read when afterwards limit_i <= bound for every outstanding i,
    the reader included. Applying another worker's update raises v by one and lowers n by one, so
    limit_i stays; a worker that leaves lowers it; only a read raises it, and that is what the rule
    checks. An update is applied at staleness v - r_i <= limit_i <= bound. No deadlock: an
    outstanding worker may always read again (r_i becomes v, n stays), and if there is none, any
    worker may read (v + 0 - v = 0). Bound 0: one worker at a time.

    That is for one server. Where a table lies on several, each with its own Clocks, a worker must
    ask them in one order, the next when the one before has let it read: two workers that ask all at
    once can each be outstanding where the other waits, for ever. In order, a worker that blocks
    another one at a server is computing, or waits at a later server. (unit="clock" needs no order:
    the slowest worker may read everywhere.)

Threads: none; the owner of the table calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.errors import UsageError

Unit = Literal["clock", "version"]


@dataclass
class WorkerClock:
    """One worker's steps, and the version that it has read."""

    clock: int
    read: int  # the version that it has
    is_outstanding: bool = False


class Clocks:
    """The clocks of a table's workers, and the rule on them."""

    def __init__(self, workers: Iterable[int], *, bound: int | None, unit: Unit = "clock") -> None:
        if bound is not None and bound < 0:
            raise UsageError(
                f"the bound on staleness is {bound}; give 0, more, or None for no bound"
            )
        if unit not in get_args(Unit):
            raise UsageError(f"the unit of the bound is {unit!r}; choose from {get_args(Unit)}")
        self.bound = bound
        self.unit = unit
        self.version = 0
        self._settle({worker: WorkerClock(clock=0, read=0) for worker in workers})

    def _settle(self, live: dict[int, WorkerClock]) -> None:
        self.live = dict(sorted(live.items()))
        self.workers = tuple(self.live)  # the live ones, in order

    def clock(self, worker: int) -> int:
        """Return how many steps a worker has finished."""
        return self._of(worker).clock

    def may_read(self, worker: int) -> bool:
        """Return whether the rule lets a worker read now."""
        return not self.blockers(worker)

    def may_read_next(self, worker: int) -> bool:
        """Return whether a worker may read after its step under way, by the present clocks."""
        if self.bound is None:
            return True
        least = self._of(worker).clock + 1 - self.bound
        others = (other for rank, other in self.live.items() if rank != worker)
        return self.unit == "clock" and all(other.clock >= least for other in others)

    def blockers(self, worker: int) -> tuple[int, ...]:
        """Return the workers that this one has to wait for before it may read."""
        reader = self._of(worker)
        if self.bound is None:
            return ()
        if self.unit == "clock":
            least = reader.clock - self.bound
            return tuple(rank for rank, other in self.live.items() if other.clock < least)
        others = self._outstanding(apart_from=worker)
        # The reader's own limit is len(others), the smallest of all: it needs no check.
        furthest = self.version + len(others)
        return tuple(rank for rank, other in others.items() if furthest - other.read > self.bound)

    def read(self, worker: int) -> None:
        """Note that a worker takes the current values: it is outstanding from now on."""
        blockers = self.blockers(worker)
        if blockers:
            raise UsageError(
                f"worker {worker} may not read at clock {self.clock(worker)}, version "
                f"{self.version}: the bound of {self.bound} {self.unit}s makes it wait for workers "
                f"{list(blockers)}; ask may_read first"
            )
        reader = self._of(worker)
        reader.read, reader.is_outstanding = self.version, True

    def advance(self, worker: int) -> None:
        """Note that a worker finished a step, whether or not its update was applied."""
        self._of(worker).clock += 1

    def applied(self, workers: Iterable[int]) -> dict[int, int]:
        """Count one more version, made of these workers' updates; return how stale each was.

        For updates that are applied when they are committed, or together after a barrier. Where
        they are pooled while their workers continue to read, the staleness of each is `version` now
        minus `version_read` at its commit.
        """
        makers = {worker: self._of(worker) for worker in workers}
        blind = [worker for worker, maker in makers.items() if not maker.is_outstanding]
        if blind and self.unit == "version" and self.bound is not None:
            raise UsageError(
                f"workers {blind} did not read since their last update; a bound in versions cannot "
                "be kept then: read before each push, or choose unit='clock'"
            )
        staleness = {worker: self.staleness(worker) for worker in makers}
        self.version += 1
        for maker in makers.values():
            maker.is_outstanding = False
            if len(makers) == 1:
                maker.read += 1  # it knows its own update
        return staleness

    def staleness(self, worker: int) -> int:
        """Return how stale an update of this worker would be if it were applied now."""
        return self.version - self._of(worker).read

    def version_read(self, worker: int) -> int:
        """Return the version that a worker has: what it read, and its own updates since."""
        return self._of(worker).read

    def leave(self, worker: int) -> None:
        """Forget a worker: no worker waits for it any more. Leaving twice does no harm."""
        self._settle({other: clock for other, clock in self.live.items() if other != worker})

    def join(self, worker: int, clock: int | None = None) -> None:
        """Add a worker, by default with the slowest worker's clock: no worker waits for it."""
        if worker in self.live:
            raise UsageError(f"worker {worker} joins, but has a clock already; let it leave first")
        if clock is None:
            clock = min((other.clock for other in self.live.values()), default=0)
        self._settle({**self.live, worker: WorkerClock(clock, read=self.version)})

    def outline(self) -> dict[int, WorkerClock]:
        """Return the clocks, for another copy of the table; the version is sent with them."""
        return dict(self.live)

    def restore(self, version: int, live: dict[int, WorkerClock]) -> None:
        """Replace the clocks by those of another copy."""
        self.version = version
        self._settle(live)

    def _outstanding(self, apart_from: int) -> dict[int, WorkerClock]:
        return {
            rank: other
            for rank, other in self.live.items()
            if other.is_outstanding and rank != apart_from
        }

    def _of(self, worker: int) -> WorkerClock:
        if worker not in self.live:
            raise UsageError(
                f"worker {worker} has no clock here: it never joined, or has left; "
                f"the live workers are {list(self.live)}"
            )
        return self.live[worker]
