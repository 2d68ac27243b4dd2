"""Lockstep and blocks: all workers wait for all of them, every step or every H steps.

In a step worker i computes for c_i. A bucket can be exchanged when the slowest worker has it, and
when the one before it has ended (`formulas.in_order_s`, the reducer's order). In a block each
worker adds up H steps of its own; the block ends with the slowest sum and an averaging round.
Vectors over the workers; a loop over steps only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.planner import formulas
from paceline.planner.simulation.delays import Delays
from paceline.planner.step_costs import StepCosts


@dataclass
class Timeline:
    """What was simulated: when each step (or block) of all workers ended, and what they waited."""

    ends_s: list[float]
    steps: int  # of each worker
    waited_s: float  # sum over all workers: for other workers
    exposed_s: float  # sum over all workers: for the exchange itself
    num_workers: int
    mean_staleness: float = 0.0
    high_staleness: float = 0.0  # 99 % are below
    most_staleness: int = 0
    total_steps: int = 0  # of all workers

    @property
    def end_s(self) -> float:
        return self.ends_s[-1] if self.ends_s else 0.0


def simulate_lockstep(costs: StepCosts, delays: Delays, num_workers: int, steps: int) -> Timeline:
    """Simulate steps in which every bucket waits for the slowest worker."""
    now_s, waited_s, exposed_s = 0.0, 0.0, 0.0
    ends_s = []
    for _ in range(steps):
        factors = costs.slowed(delays.step())
        slowest = float(factors.max())
        ready_s = [costs.before_s * slowest + ready * slowest for ready in costs.ready_s]
        compute_s = costs.compute_s * slowest
        end_s = max(compute_s, formulas.in_order_s(ready_s, costs.takes_s)) + costs.tail_s
        waited_s += float(np.sum(compute_s - costs.compute_s * factors))
        exposed_s += (end_s - compute_s) * num_workers
        now_s += end_s
        ends_s.append(now_s)
    return Timeline(
        ends_s, steps, waited_s, exposed_s, num_workers, total_steps=steps * num_workers
    )


def simulate_blocks(
    costs: StepCosts, delays: Delays, num_workers: int, steps: int, per_round: int
) -> Timeline:
    """Simulate blocks of local steps, each with a round that waits for the slowest worker."""
    now_s, waited_s, exposed_s, done = 0.0, 0.0, 0.0, 0
    ends_s = []
    while done < steps:
        count = min(per_round, steps - done)
        sums = np.zeros(num_workers)
        for _ in range(count):
            sums += delays.step()
        sums *= costs.compute_s
        slowest = float(sums.max())
        waited_s += float(np.sum(slowest - sums))
        round_s = costs.round_s * count / per_round  # a last, shorter block pays its share
        exposed_s += round_s * num_workers
        now_s += slowest + round_s
        done += count
        ends_s.append(now_s)
    return Timeline(
        ends_s, steps, waited_s, exposed_s, num_workers, total_steps=steps * num_workers
    )
