"""predict: the mean step of one candidate, with an interval, from its costs and from chance.

In lockstep every step takes as long as on the slowest worker. In a block of H steps a worker can
make up for a slow one. Free-running workers have the mean of their speeds; a bound of s steps lets
random delays average over s + 1 steps, and does not help against a worker that is always slow.
simulation/ plays the same costs out; tests compare the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.planner import formulas
from paceline.planner.candidates import Candidate
from paceline.planner.cluster import Cluster
from paceline.planner.profile import ModelProfile
from paceline.planner.quantities import NO_STRAGGLER, Straggler
from paceline.planner.step_costs import (
    BLOCKS,
    DEFAULT_CONSTANTS,
    FREE,
    Constants,
    StepCosts,
    step_costs,
)

_INTERVAL_SIGMAS = 1.645  # 90 % of a normal distribution
_SLOW = 1.25  # from here on a plan names the slowest worker


@dataclass(frozen=True)
class Prediction:
    """What a candidate would do."""

    candidate: Candidate
    step_s: float  # of one worker, mean
    low_s: float  # 90 % interval
    high_s: float
    samples_per_s: float  # of all workers
    sent_bytes: float  # of a host to other hosts in a step
    memory_bytes: float  # of the largest process
    staleness: float  # mean number of versions of others that an update has not seen
    busy_s: dict[str, float] = field(default_factory=dict)  # of each resource in a step

    @property
    def limit(self) -> str:
        """The resource that is busiest."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])


def predict(
    candidate: Candidate,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    straggler: Straggler = NO_STRAGGLER,
    constants: Constants = DEFAULT_CONSTANTS,
    copies: int = 1,
    bandwidth_cv: float = 0.0,
) -> Prediction:
    """Predict one candidate. `copies` of the process were measured at once on one machine;
    `bandwidth_cv` is the relative error of the measured links."""
    costs = step_costs(candidate, profile, cluster, constants, copies)
    num_workers = cluster.num_workers
    step_s, slow = _mean_step_s(costs, _cv(profile, cluster), num_workers, straggler)
    busy_s = dict(costs.busy_s)
    if slow > _SLOW:
        busy_s["the slowest worker"] = costs.compute_s * slow
    on_links = min(1.0, busy_s.get("link", 0.0) / step_s)
    mean_cv = profile.cv / math.sqrt(profile.steps) if profile.steps else 0.0
    sigma = math.sqrt(constants.sigma**2 + mean_cv**2 + (on_links * bandwidth_cv) ** 2)
    spread = math.exp(_INTERVAL_SIGMAS * sigma)
    return Prediction(
        candidate,
        step_s,
        step_s / spread,
        step_s * spread,
        profile.batch * num_workers * costs.data_share / step_s,
        costs.sent_bytes,
        costs.memory_bytes,
        float(num_workers - 1) if costs.kind == FREE else 0.0,
        busy_s,
    )


def _cv(profile: ModelProfile, cluster: Cluster) -> float:
    """Return the variation of workers' steps that makes others wait.

    Where workers share too few cores, one is slow because another runs: no core is idle, and
    nothing is lost by waiting for it.
    """
    is_crowded = any(
        workers * profile.threads > cores for cores, _, workers in cluster.machine_loads()
    )
    return 0.0 if is_crowded else profile.cv


def _mean_step_s(
    costs: StepCosts, cv: float, num_workers: int, straggler: Straggler
) -> tuple[float, float]:
    """Return the mean step, and the slowest worker's computation relative to the mean."""
    if costs.kind == BLOCKS:
        slow = slowness(num_workers, cv, straggler, costs.per_round)
        return costs.compute_s * slow + costs.round_s / costs.per_round, slow
    if costs.kind == FREE:
        return _free_step_s(costs, cv, num_workers, straggler)
    slow = slowness(num_workers, cv, straggler)
    return lockstep_s(costs, slow), slow


def lockstep_s(costs: StepCosts, slow: float = 1.0) -> float:
    """Return a step in which the slowest worker computes `slow` times as long as the mean."""
    slow = costs.slowed(slow)
    ready_s = [(costs.before_s + ready) * slow for ready in costs.ready_s]
    end_s = formulas.in_order_s(ready_s, costs.takes_s)
    return max(costs.compute_s * slow, end_s) + costs.tail_s


def slowness(num_workers: int, cv: float, straggler: Straggler, steps: int = 1) -> float:
    """Return the slowest worker's time for a step, relative to the mean, over blocks of steps."""
    slow = formulas.slowest_of(1.0, cv, num_workers, steps)
    if straggler.workers:
        return slow * straggler.factor
    more, p = straggler.factor - 1, straggler.probability
    if steps == 1:
        return slow * (1 + more * (1 - (1 - p) ** num_workers))
    spread = more * math.sqrt(p * (1 - p) / steps)
    return slow * (1 + more * p + spread * formulas.expected_max(num_workers))


def _free_step_s(
    costs: StepCosts, cv: float, num_workers: int, straggler: Straggler
) -> tuple[float, float]:
    n = num_workers
    least_s = costs.served_s * n  # the servers and their links do nothing else

    def taken_s(slow: float) -> float:
        """Return the step of a worker that computes `slow` times as long."""
        more_s = (costs.slowed(slow) - 1) * costs.compute_s
        return max(costs.alone_s + costs.served_s + more_s, least_s)

    if straggler.workers and costs.bound is None:
        few = min(straggler.workers, n)
        usual_s, slow_s = taken_s(1.0), taken_s(straggler.factor)
        return n / ((n - few) / usual_s + few / slow_s), 1.0
    slow = 1.0
    if costs.bound is not None:
        slow = slowness(n, cv, straggler, costs.bound + 1)
    elif straggler.probability:
        slow = 1 + (straggler.factor - 1) * straggler.probability
    return taken_s(slow), slow
