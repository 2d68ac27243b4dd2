"""ssp and async: every worker at its own speed, through servers, with the servers' clock rule.

A worker reads the parameters, computes, pushes; its update is applied and counts one version. The
servers serve one worker after the other, in the order of arrival. Then the rule (clock_rules.py)
decides which workers read and go on.
"""

from __future__ import annotations

import heapq

import numpy as np

from paceline.planner.simulation.clock_rules import ClockRule, make_rule
from paceline.planner.simulation.delays import Delays
from paceline.planner.simulation.lockstep import Timeline
from paceline.planner.step_costs import StepCosts


def simulate_free(
    costs: StepCosts,
    delays: Delays,
    num_workers: int,
    steps: int,
    rule: ClockRule | None = None,
) -> Timeline:
    """Simulate `steps` steps per worker on average; fast workers take more of them."""
    rule = rule or make_rule(num_workers, costs.bound)
    total = steps * num_workers
    compute_s, served_s = costs.compute_s, costs.served_s
    fixed_s = costs.alone_s - compute_s  # the exchange does not take longer on a slow worker
    pushed_s = [0.0] * num_workers  # end of each worker's last push
    staleness = np.zeros(total, dtype=np.int64)
    ends_s = np.zeros(total)

    def next_steps() -> list[float]:
        """Return the time of each worker from reading to its push."""
        took_s: list[float] = (fixed_s + costs.slowed(delays.step()) * compute_s).tolist()
        return took_s

    rows = [next_steps()]
    taken = [1] * num_workers
    # When each worker's push arrives at the servers.
    events = [(took_s, worker) for worker, took_s in enumerate(rows[0])]
    heapq.heapify(events)
    pop, push, finish = heapq.heappop, heapq.heappush, rule.finish
    now_s = waited_s = 0.0
    exposed_s = fixed_s * total
    for done in range(total):
        arrived_s, worker = pop(events)
        now_s = (arrived_s if arrived_s > now_s else now_s) + served_s
        exposed_s += now_s - arrived_s
        ends_s[done] = pushed_s[worker] = now_s
        staleness[done], released = finish(worker)
        for other in released:
            waited_s += now_s - pushed_s[other]
            at = taken[other]
            taken[other] = at + 1
            if at == len(rows):  # the fastest worker needs another step's delays
                rows.append(next_steps())
            push(events, (now_s + rows[at][other], other))
    return Timeline(
        ends_s[num_workers - 1 :: num_workers].tolist(),
        steps,
        waited_s,
        exposed_s,
        num_workers,
        float(staleness.mean()),
        float(np.quantile(staleness, 0.99)),
        int(staleness.max()),
        total_steps=total,
    )
