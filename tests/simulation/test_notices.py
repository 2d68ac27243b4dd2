"""A long simulated training: hosts go away after notices, and processes are killed.

Nothing that was acknowledged is lost (the oracle checks that), and at least 95 % of the steps of an
undisturbed job are made. PACELINE_SIMULATION_MINUTES=30 is 100 of them in half an hour of virtual
time, which takes about 40 s.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

from simulation.job import SimJob, plan_of_notices

MINUTES = float(os.environ.get("PACELINE_SIMULATION_MINUTES", "3"))
EVENTS = round(MINUTES / 0.3)


def run(*, disturbed: bool) -> tuple[SimJob, int]:
    """Return a job that has run to its end, and how many steps its workers have made in all."""
    plan = plan_of_notices(22, MINUTES * 60, EVENTS)
    job = SimJob(plan if disturbed else replace(plan, faults=()))
    job.run()
    steps: Counter[int] = Counter()  # by number of the worker
    for member in job.by_rank.values():
        if member.role == "worker":
            steps[member.number] += member.additions  # type: ignore[attr-defined]
    return job, sum(steps.values())


def test_notices_and_kills_every_few_seconds() -> None:
    _, undisturbed = run(disturbed=False)
    job, made = run(disturbed=True)
    assert not job.oracle.end_of_job, job.oracle.end_of_job
    kinds = Counter(fault.kind for fault in job.plan.faults)
    assert kinds["notice"] >= EVENTS // 4 and kinds.total() == EVENTS
    assert job.oracle.counted["processes lost at a deadline"] == 0, "all hosts left in time"
    assert job.oracle.num_acked > 0
    efficiency = made / undisturbed
    print(f"efficiency {efficiency:.4f}: {made} of {undisturbed} steps; {dict(kinds)}")
    assert efficiency >= 0.95
