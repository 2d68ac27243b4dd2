"""The simulation: its clock rule is the servers', its failures add up, its figures are seeded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planner.candidates import candidate
from paceline.planner.cluster import even_cluster
from paceline.planner.profile import BucketProfile, ModelProfile
from paceline.planner.quantities import Link, Straggler
from paceline.planner.simulation.clock_rules import CountedRule, ServerRule
from paceline.planner.simulation.delays import Delays
from paceline.planner.simulation.failures import FailurePlan, simulate_failures
from paceline.planner.simulation.free_running import simulate_free
from paceline.planner.simulation.run import Scenario
from paceline.planner.simulation.sweep import as_csv, parse_sweep, sweep
from paceline.planner.step_costs import FREE, StepCosts

PROFILE = ModelProfile(
    name="m",
    batch=8,
    forward_s=0.1,
    backward_s=0.2,
    optimizer_s=0.0,
    input_s=0.0,
    buckets=(BucketProfile(10**7, 0.2),),
    cv=0.1,
)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 6),
    bound=st.one_of(st.none(), st.integers(0, 4)),
    choices=st.lists(st.integers(0, 5), max_size=120),
)
def test_the_counted_rule_is_the_servers_rule(n, bound, choices):
    # Any order in which workers that may compute push.
    servers, counted = ServerRule(n, bound), CountedRule(n, bound)
    computing = list(range(n))
    for choice in choices:
        worker = computing.pop(choice % len(computing))
        expected_staleness, expected = servers.finish(worker)
        staleness, released = counted.finish(worker)
        assert (staleness, sorted(released)) == (expected_staleness, sorted(expected))
        computing += released


@pytest.mark.parametrize("bound", [None, 0, 2])
def test_both_rules_give_the_same_run(bound):
    costs = StepCosts(FREE, 0.1, 0.2, served_s=0.01, bound=bound)
    runs = [
        simulate_free(costs, Delays(5, 0.2, Straggler(3.0, 0.1), seed=7), 5, 40, rule(5, bound))
        for rule in (ServerRule, CountedRule)
    ]
    assert runs[0] == runs[1]
    if bound == 0:  # a barrier: the staleness of all but the first is what the others made
        assert runs[0].most_staleness <= 4
    if bound is not None:
        assert runs[0].most_staleness <= 4 * (2 * bound + 1)


def test_a_bound_makes_fast_workers_wait_for_the_slow_one():
    costs = StepCosts(FREE, 0.1, 0.2, bound=3)
    slow = Straggler(4.0, workers=1)
    bounded = simulate_free(costs, Delays(4, 0.0, slow, 0), 4, 200)
    free = simulate_free(StepCosts(FREE, 0.1, 0.2), Delays(4, 0.0, slow, 0), 4, 200)
    assert bounded.end_s == pytest.approx(200 * 1.2, rel=0.05)
    assert free.end_s == pytest.approx(800 / (3 / 0.3 + 1 / 1.2), rel=0.05)
    assert bounded.waited_s > 100 and free.waited_s == 0


def test_free_running_time_is_computation_waiting_or_exchange():
    costs = StepCosts(FREE, 0.1, 0.2, (0.2,), (0.5,), tail_s=0.05, served_s=0.1, bound=1)
    run = simulate_free(costs, Delays(4, 0.1, Straggler(), 0), 4, 200)
    assert run.exposed_s > 4 * 200 * 0.5
    computed_s = run.end_s * 4 - run.exposed_s - run.waited_s
    assert computed_s == pytest.approx(4 * 200 * 0.3, rel=0.02)


def test_failures_cost_what_is_repeated_and_restarted():
    never = simulate_failures(FailurePlan(), 1000.0, 1.0, seed=0)
    assert (never.failures, never.total_s) == (0, 0.0)
    saved = simulate_failures(FailurePlan(None, 100.0, 2.0), 1000.0, 1.0, seed=0)
    assert (saved.checkpoints, saved.total_s) == (9, 18.0)
    plan = FailurePlan(mtbf_s=2000.0, checkpoint_s=2.0, restart_s=60.0)
    assert plan.interval_s == pytest.approx((2 * 2 * 2000) ** 0.5)
    work_s = 1e6
    lost = simulate_failures(plan, work_s, 1.0, seed=3)
    assert lost.total_s / (work_s + lost.total_s) == pytest.approx(
        plan.expected_share(1.0), rel=0.15
    )
    elastic = FailurePlan(mtbf_s=2000.0, is_elastic=True)
    assert simulate_failures(elastic, work_s, 1.0, seed=3).lost_s < lost.lost_s / 20


def test_a_sweep_becomes_csv():
    scenario = Scenario(PROFILE, even_cluster(4, Link(1e8, 1e-4)), steps=5)
    axes = dict([parse_sweep("workers=2,8"), parse_sweep("bandwidth=1gbit,10gbit")])
    rows = list(
        sweep(
            [candidate("allreduce"), candidate("ps", 2)],
            scenario,
            axes["workers"],
            axes["bandwidth"],
            [],
        )
    )
    lines = as_csv(rows).splitlines()
    assert len(lines) == 1 + 8
    assert lines[0].startswith("pace,servers,workers,bandwidth,per_host,step_s")
    assert [line.split(",")[:5] for line in lines[1:3]] == [
        ["allreduce", "0", "2", "1gbit", "1"],
        ["ps", "1", "2", "1gbit", "1"],
    ]
