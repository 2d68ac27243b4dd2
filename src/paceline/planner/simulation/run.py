"""One simulation of one candidate: the timeline, failures, and the figures that are printed."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.planner.candidates import Candidate
from paceline.planner.cluster import Cluster
from paceline.planner.profile import ModelProfile
from paceline.planner.quantities import NO_STRAGGLER, Straggler
from paceline.planner.simulation.delays import Delays
from paceline.planner.simulation.failures import FailureCost, FailurePlan, simulate_failures
from paceline.planner.simulation.free_running import simulate_free
from paceline.planner.simulation.lockstep import Timeline, simulate_blocks, simulate_lockstep
from paceline.planner.step_costs import BLOCKS, FREE, StepCosts, step_costs


@dataclass(frozen=True)
class Scenario:
    """What is simulated, apart from the candidate."""

    profile: ModelProfile
    cluster: Cluster
    steps: int = 200
    straggler: Straggler = NO_STRAGGLER
    failures: FailurePlan = FailurePlan()
    seed: int = 0


@dataclass(frozen=True)
class Simulated:
    """The figures of one simulation."""

    candidate: Candidate
    num_workers: int
    step_s: float  # mean of a worker, without failures
    samples_per_s: float  # of all workers, failures and checkpoints included
    efficiency: float  # relative to workers that compute and do nothing else, without stragglers
    waiting: float  # share of time that workers wait for other workers
    exchanging: float  # share of time that workers wait for the exchange
    mean_staleness: float
    high_staleness: float
    most_staleness: int
    failures: FailureCost
    failure_share: float  # expected in the long run
    limit: str
    sent_bytes: float


def simulate(candidate: Candidate, scenario: Scenario) -> Simulated:
    """Simulate a candidate. The same scenario and seed give the same figures."""
    profile, cluster = scenario.profile, scenario.cluster
    costs = step_costs(candidate, profile, cluster)
    n = cluster.num_workers
    delays = Delays(n, profile.cv, scenario.straggler, scenario.seed)
    timeline = _play(costs, delays, n, scenario.steps)
    step_s = timeline.end_s * n / timeline.total_steps
    lost = simulate_failures(scenario.failures, timeline.end_s, step_s, scenario.seed)
    samples = profile.batch * timeline.total_steps * costs.data_share
    samples_per_s = samples / (timeline.end_s + lost.total_s)
    worked_s = timeline.end_s * n
    return Simulated(
        candidate,
        n,
        step_s,
        samples_per_s,
        samples_per_s * profile.compute_s / (profile.batch * n),
        timeline.waited_s / worked_s,
        timeline.exposed_s / worked_s,
        timeline.mean_staleness,
        timeline.high_staleness,
        timeline.most_staleness,
        lost,
        scenario.failures.expected_share(step_s),
        max(costs.busy_s, key=lambda name: costs.busy_s[name]),
        costs.sent_bytes,
    )


def _play(costs: StepCosts, delays: Delays, num_workers: int, steps: int) -> Timeline:
    if costs.kind == BLOCKS:
        return simulate_blocks(costs, delays, num_workers, steps, costs.per_round)
    if costs.kind == FREE:
        return simulate_free(costs, delays, num_workers, steps)
    return simulate_lockstep(costs, delays, num_workers, steps)
