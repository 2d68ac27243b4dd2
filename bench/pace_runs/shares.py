"""How many steps each worker does, so that all of them together do a given number.

In lockstep all workers do the same number. Free-running workers take as many as their speed allows:
from the simulation of their delays (servers/simulation.py), up to the moment when the number is
reached. The numbers are fixed before a run, so that the workers need no communication while they
are timed.
"""

from __future__ import annotations

from servers.delays import Delays
from servers.simulation import simulate

from pace_runs.table import Row


def shares(row: Row, total: int, num_workers: int, delays: Delays | None) -> list[int]:
    """Return the steps of each worker; they add up to `total`, in lockstep to the next multiple."""
    if delays is None or not row.free:
        return [-(-total // num_workers)] * num_workers
    longest_s = delays.base_s * max(delays.factors) * delays.slow_factor
    low_s, high_s = 0.0, (total // num_workers + 1) * longest_s
    while high_s - low_s > delays.base_s / 100:
        middle_s = (low_s + high_s) / 2
        if sum(_steps(row, delays, middle_s)) < total:
            low_s = middle_s
        else:
            high_s = middle_s
    found = list(_steps(row, delays, high_s))
    # Some end at the same moment, and so exceed the total; the furthest worker does less.
    while sum(found) > total:
        found[found.index(max(found))] -= 1
    return found


def _steps(row: Row, delays: Delays, horizon_s: float) -> tuple[int, ...]:
    return simulate(delays.until(horizon_s), row.bound, horizon_s).steps
