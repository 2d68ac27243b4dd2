"""Predictions: exact cases, what must hold for any model, and the recommendation."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.planner.candidates import Candidate, candidate, enumerate_candidates, meshes
from paceline.planner.cluster import Cluster, Host, even_cluster, local_cluster
from paceline.planner.predict import predict
from paceline.planner.profile import BucketProfile, ModelProfile, even_buckets
from paceline.planner.quantities import Link, Straggler
from paceline.planner.ranking import make_plan
from paceline.planner.servers import choose_servers
from paceline.planner.simulation.run import Scenario, simulate
from paceline.planner.step_costs import Constants

# Nothing costs anything but links: the formulas alone remain.
BARE = Constants(0, 0, 0, 0, 0, 0, link_share=1.0, sigma=0.1)
PROFILE = ModelProfile(
    name="m",
    batch=8,
    forward_s=0.1,
    backward_s=0.2,
    optimizer_s=0.0,
    input_s=0.0,
    buckets=(BucketProfile(10**8, 0.2),),
)


def wired(num_workers: int, rate: float, server_hosts: int = 0, per_host: int = 1) -> Cluster:
    cluster = even_cluster(num_workers, Link(rate, 0.0), per_host=per_host, cores=64)
    return msgspec.structs.replace(
        cluster, server_hosts=server_hosts, wire_cpu_s_per_byte=0.0, copy_bytes_per_s=1e15
    )


def step_of(text: str, cluster: Cluster, servers: int = 0, **more: object) -> float:
    one = candidate(text, servers)
    return predict(one, PROFILE, cluster, constants=BARE, **more).step_s


def test_allreduce_is_computation_and_a_ring():
    # One bucket, ready at the end of backward: nothing is hidden.
    assert step_of("allreduce", wired(4, 1e8)) == pytest.approx(0.3 + 1.5)
    assert step_of("allreduce", wired(1, 1e8)) == pytest.approx(0.3)
    # Four workers on two hosts: each byte crosses once per host.
    assert step_of("allreduce", wired(4, 1e8, per_host=2)) == pytest.approx(0.3 + 1.0)


def test_buckets_hide_what_backward_covers():
    halves = (BucketProfile(5 * 10**7, 0.1), BucketProfile(5 * 10**7, 0.2))
    profile = msgspec.structs.replace(PROFILE, buckets=halves)
    fast = predict(candidate("allreduce"), profile, wired(2, 1e9), constants=BARE)
    assert fast.step_s == pytest.approx(0.3 + 0.05)  # the first half is sent during backward
    slow = predict(candidate("allreduce"), profile, wired(2, 1e8), constants=BARE)
    assert slow.step_s == pytest.approx(0.1 + 0.1 + 1.0)
    assert (fast.limit, slow.limit) == ("computation", "link")


def test_servers_on_hosts_of_their_own():
    # Push M and receive the average, pull M: two times n M / (k B), until the workers' links limit.
    two = step_of("ps", wired(4, 1e8, server_hosts=2), 2)
    assert two == pytest.approx(0.3 + 2 * 2.0)
    four = step_of("ps", wired(4, 1e8, server_hosts=4), 4)
    assert four == pytest.approx(0.3 + 2 * 1.0)
    assert step_of("ps", wired(4, 1e8, server_hosts=8), 8) == pytest.approx(four)


def test_servers_beside_workers_share_their_links():
    # Half of M stays on the host. Pushes and averages leave by the same link: M. Then pulls: M / 2.
    one = candidate("ps", 2, is_colocated=True)
    found = predict(one, PROFILE, wired(2, 1e8), constants=BARE)
    assert found.step_s == pytest.approx(0.3 + 1.0 + 0.5)
    assert found.sent_bytes == pytest.approx(1.5e8)


def test_local_steps_divide_the_exchange():
    every = step_of("local:1", wired(4, 1e8))
    assert every == pytest.approx(0.3 + 1.5)
    assert step_of("local:8", wired(4, 1e8)) == pytest.approx(0.3 + 1.5 / 8)
    assert step_of("local:8[compress=bf16]", wired(4, 1e8)) == pytest.approx(0.3 + 0.75 / 8)


def test_one_slow_worker_delays_all_but_async():
    slow = Straggler(4.0, workers=1)
    lockstep = step_of("allreduce", wired(4, 1e15), straggler=slow)
    assert lockstep == pytest.approx(1.2)
    assert step_of("local:8", wired(4, 1e15), straggler=slow) == pytest.approx(1.2)
    assert step_of("ssp:3", wired(4, 1e15), 1, straggler=slow) == pytest.approx(1.2)
    free = step_of("async", wired(4, 1e15), 1, straggler=slow)
    assert free == pytest.approx(4 / (3 / 0.3 + 1 / 1.2))


def test_a_slow_worker_needs_no_more_of_the_cores_for_its_exchange():
    """Two workers on two cores: the exchange makes computation longer, and that part only once."""
    both = Cluster((Host("a", 2, 0, 1, machine=0), Host("b", 2, 0, 1, machine=0)), Link(1e15, 0.0))
    costly = msgspec.structs.replace(both, wire_cpu_s_per_byte=1e-9)
    for text in ("allreduce", "ssp:3"):
        slow, usual = (
            predict(candidate(text), PROFILE, costly, straggler=Straggler(factor, workers=1))
            for factor in (3.0, 1.0)
        )
        assert slow.step_s - usual.step_s == pytest.approx(2 * 0.3, rel=1e-6)


def test_cores_that_are_missing_make_computation_longer():
    two = predict(candidate("local:500"), PROFILE, local_cluster(2, 2, 0), constants=BARE)
    four = predict(candidate("local:500"), PROFILE, local_cluster(4, 2, 0), constants=BARE)
    assert four.step_s == pytest.approx(2 * two.step_s)
    # If four were measured together, their times contain it already.
    again = predict(
        candidate("local:500"), PROFILE, local_cluster(4, 2, 0), constants=BARE, copies=4
    )
    assert again.step_s == pytest.approx(two.step_s)


def test_the_number_of_servers_has_a_derivation():
    def with_servers(count: int):
        cluster = wired(4, 1e8, server_hosts=count)
        return predict(candidate("ps", count), PROFILE, cluster, constants=BARE)

    choice = choose_servers(with_servers, 8)
    assert choice.count == 4
    assert choice.derivation.startswith("server links are the limit up to 3 servers; 4 give 3.6 x")
    assert choice.derivation.endswith("one more gives nothing")
    enough = choose_servers(with_servers, 1)
    assert enough.count == 1 and enough.derivation == "server links are the limit with 1 server"


def test_servers_without_hosts_of_their_own_are_listed_once():
    def labels(servers: int) -> list[str]:
        found = enumerate_candidates(PROFILE, wired(4, 1e8, server_hosts=servers))
        return [one.label for one in found if one.pace.name == "ps"]

    assert labels(0) == ["ps, 1 server", "ps, 2 servers", "ps, colocated"]
    assert labels(4) == ["ps, 1 server", "ps, 2 servers", "ps, 4 servers", "ps, colocated"]


def test_a_plan_prefers_exact_and_says_what_it_does_not_know():
    small = msgspec.structs.replace(PROFILE, buckets=(BucketProfile(10**7, 0.2),))
    plan = make_plan(small, local_cluster(2, 2, 0))
    assert str(plan.best.candidate.pace) == "allreduce"
    slow = make_plan(PROFILE, even_cluster(4, Link(1e7, 1e-4)))
    costs = {row.candidate.label: row.cost.source for row in slow.rows}
    assert costs["allreduce"] == "exact" and costs["local:8"] == "table"
    assert costs["diloco:500"] == costs["local:8[compress=int8]"] == "unknown"
    assert slow.rows[0].candidate.label == "diloco:500"  # the fastest, but its loss is unknown
    assert slow.best.cost.source == "table"
    assert all(
        row.prediction.low_s < row.prediction.step_s < row.prediction.high_s for row in slow.rows
    )
    assert [r.prediction.samples_per_s for r in slow.rows] == sorted(
        (r.prediction.samples_per_s for r in slow.rows), reverse=True
    )


def test_a_budget_of_bandwidth_excludes_what_sends_more():
    cluster = even_cluster(4, Link(1.25e8, 1e-4))
    plan = make_plan(PROFILE, cluster, max_wire_bytes_per_s=25e6)
    assert all(r.prediction.sent_bytes / r.prediction.step_s <= 25e6 for r in plan.rows)
    assert "allreduce" not in [row.candidate.label for row in plan.rows]
    with pytest.raises(UsageError, match=r"--max-wire 0.008mbit: no pace sends so little; diloco"):
        make_plan(PROFILE, cluster, max_wire_bytes_per_s=1e3)


def test_a_model_that_fits_nowhere_says_what_would():
    large = msgspec.structs.replace(
        PROFILE, buckets=even_buckets(64e9, 0.2), state_factor=2.0, activation_bytes=10**9
    )
    hosts = tuple(Host(f"h{at}", 8, 16 * 10**9, 1) for at in range(4))
    with pytest.raises(UsageError, match=r"needs 257 GB per process.*lacks 49 GB.*fsdp=18 would"):
        make_plan(large, Cluster(hosts))
    eight = tuple(Host(f"h{at}", 8, 40 * 10**9, 1) for at in range(8))
    plan = make_plan(large, Cluster(eight))
    assert {row.candidate.mesh for row in plan.rows} == {"fsdp=8"}
    assert ("allreduce", pytest.approx(217e9)) in [(c.label, b) for c, b in plan.too_large]


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(UsageError, match="pace gossip cannot be planned.*paceline compare"):
        candidate("gossip:ring")
    assert meshes(6, 0) == ["dp=3,fsdp=2", "dp=2,fsdp=3", "fsdp=6"]


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(2, 12),
    rate=st.floats(1e6, 1e10),
    text=st.sampled_from(["allreduce", "ps", "async", "ssp:3", "local:8", "diloco:50"]),
)
def test_a_faster_link_never_makes_a_step_longer(n, rate, text):
    one = candidate(text, n)
    slow = predict(one, PROFILE, even_cluster(n, Link(rate, 1e-4)))
    fast = predict(one, PROFILE, even_cluster(n, Link(rate * 2, 1e-4)))
    assert fast.step_s <= slow.step_s * (1 + 1e-9)
    assert slow.memory_bytes > 0 and slow.samples_per_s > 0


@pytest.mark.parametrize("text", ["allreduce", "ps", "async", "ssp:3", "local:8", "diloco:50"])
@pytest.mark.parametrize("straggler", [Straggler(), Straggler(3.0, 0.05), Straggler(3.0, 0.0, 1)])
def test_prediction_and_simulation_agree(text, straggler):
    profile = msgspec.structs.replace(PROFILE, cv=0.05)
    cluster = even_cluster(8, Link(1e9, 1e-4))
    one: Candidate = candidate(text, 8)
    expected = predict(one, profile, cluster, straggler=straggler).step_s
    found = simulate(one, Scenario(profile, cluster, 600, straggler)).step_s
    assert found == pytest.approx(expected, rel=0.15)
    again = simulate(one, replace(Scenario(profile, cluster, 600, straggler), seed=0)).step_s
    assert again == found
