"""Which worker may read next: the servers' clock rule, for the simulation.

`ServerRule` asks `Clocks` of the servers themselves (ps/server/staleness_bound.py). Asking takes
time in proportion to the workers, so for many workers `CountedRule` gives the same answers from
counts. tests/unit/planner/test_simulation.py compares the two, event by event.
"""

from __future__ import annotations

from typing import Protocol

from paceline.ps.server.staleness_bound import Clocks

_FEW = 64  # workers up to which the servers' own rule is used


class ClockRule(Protocol):
    """A worker pushes its update; the rule says how stale it was and which workers read now."""

    def finish(self, worker: int) -> tuple[int, list[int]]: ...


class ServerRule:
    """The rule as the servers apply it."""

    def __init__(self, num_workers: int, bound: int | None) -> None:
        self._clocks = Clocks(range(num_workers), bound=bound)
        self._held: list[int] = []
        for worker in range(num_workers):
            self._clocks.read(worker)

    def finish(self, worker: int) -> tuple[int, list[int]]:
        """Apply a worker's update; return its staleness and the workers that read now."""
        clocks = self._clocks
        staleness = clocks.applied((worker,))[worker]
        clocks.advance(worker)
        self._held.append(worker)
        released = [one for one in self._held if clocks.may_read(one)]
        for one in released:
            clocks.read(one)
            self._held.remove(one)
        return staleness, released


class CountedRule:
    """The same in constant time: the slowest clock is followed, not searched."""

    def __init__(self, num_workers: int, bound: int | None) -> None:
        self._bound = bound
        self._clocks = [0] * num_workers
        self._read = [0] * num_workers
        self._version = 0
        self._at = {0: num_workers}  # workers by clock
        self._slowest = 0
        self._held: dict[int, list[int]] = {}  # by the clock that all workers must reach

    def finish(self, worker: int) -> tuple[int, list[int]]:
        """Apply a worker's update; return its staleness and the workers that read now."""
        version = self._version + 1
        staleness = self._version - self._read[worker]
        self._version = version
        bound = self._bound
        if bound is None:
            self._read[worker] = version
            return staleness, [worker]
        clock = self._clocks[worker] + 1
        self._clocks[worker] = clock
        at = self._at
        at[clock] = at.get(clock, 0) + 1
        at[clock - 1] -= 1
        slowest = self._slowest
        released: list[int] = []
        while not at[slowest]:
            del at[slowest]
            slowest += 1
            released += self._held.pop(slowest, ())
        self._slowest = slowest
        if clock - bound <= slowest:
            released.append(worker)
        else:
            self._held.setdefault(clock - bound, []).append(worker)
        for one in released:
            self._read[one] = version
        return staleness, released


def make_rule(num_workers: int, bound: int | None) -> ClockRule:
    """Return the servers' rule, or its equal for many workers."""
    kind = ServerRule if num_workers <= _FEW else CountedRule
    return kind(num_workers, bound)
