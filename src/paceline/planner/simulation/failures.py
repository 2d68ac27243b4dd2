"""What failures and checkpoints cost: Poisson failures over the simulated time.

MTBF is that of the whole job. After a failure the job loses everything since the last checkpoint
and restarts; an elastic job repeats one step and pauses for its recovery. The simulated time may be
shorter than the MTBF, so `expected_share` gives the long-run cost by Young's formula as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.planner import formulas


@dataclass(frozen=True)
class FailurePlan:
    """When the job fails, and what it does then."""

    mtbf_s: float | None = None  # of the job; None: never
    checkpoint_every_s: float | None = None  # None: Young's interval
    checkpoint_s: float = 2.0  # how long training stands still for one
    restart_s: float = 60.0
    is_elastic: bool = False
    recovery_s: float = 0.5  # pause of an elastic job

    @property
    def interval_s(self) -> float | None:
        """Time between two checkpoints."""
        if self.checkpoint_every_s is not None:
            return self.checkpoint_every_s
        if self.mtbf_s is None or self.checkpoint_s <= 0:
            return None
        return formulas.checkpoint_interval_s(self.checkpoint_s, self.mtbf_s)

    def expected_share(self, step_s: float) -> float:
        """Return the long-run share of time that failures and checkpoints cost."""
        interval_s = self.interval_s
        if self.mtbf_s is None:
            return min(1.0, self.checkpoint_s / interval_s) if interval_s else 0.0
        if self.is_elastic:
            share = (step_s + self.recovery_s) / self.mtbf_s
            return min(1.0, share + (self.checkpoint_s / interval_s if interval_s else 0.0))
        if interval_s is None:
            return 1.0
        return formulas.failure_share(interval_s, self.checkpoint_s, self.restart_s, self.mtbf_s)


@dataclass(frozen=True)
class FailureCost:
    """What happened in the simulated time."""

    failures: int = 0
    lost_s: float = 0.0  # repeated work, restarts, recoveries
    checkpoints: int = 0
    checkpoint_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.lost_s + self.checkpoint_s


def simulate_failures(plan: FailurePlan, work_s: float, step_s: float, seed: int) -> FailureCost:
    """Let so much work happen, with checkpoints and failures; return what they added."""
    random = np.random.default_rng([seed, 1])
    interval_s = plan.interval_s
    done_s = saved_s = now_s = 0.0
    failures = checkpoints = 0
    lost_s = 0.0
    next_failure_s = random.exponential(plan.mtbf_s) if plan.mtbf_s else float("inf")
    limit_s = 1000 * (work_s + 1)  # a job that fails faster than it works never ends
    while done_s < work_s and now_s < limit_s:
        until_save_s = saved_s + interval_s - done_s if interval_s else float("inf")
        stretch_s = min(work_s - done_s, until_save_s)
        if now_s + stretch_s >= next_failure_s:
            done_s += max(0.0, next_failure_s - now_s)
            back_s = min(step_s, done_s) if plan.is_elastic else done_s - saved_s
            pause_s = plan.recovery_s if plan.is_elastic else plan.restart_s
            failures += 1
            lost_s += back_s + pause_s
            done_s -= back_s
            now_s = next_failure_s + pause_s
            next_failure_s = now_s + random.exponential(plan.mtbf_s or 0.0)
            continue
        now_s += stretch_s
        done_s += stretch_s
        if interval_s and done_s < work_s:
            checkpoints += 1
            now_s += plan.checkpoint_s
            saved_s = done_s
    return FailureCost(failures, lost_s, checkpoints, checkpoints * plan.checkpoint_s)
