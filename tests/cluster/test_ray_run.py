"""`paceline run --on ray` on a real cluster of Ray: training, bad input, two jobs, cancel."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster.ray_cluster import SESSIONS, RayCluster
from support.cluster.ray_job import RayJob

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture
def bench(ray_hosts: RayCluster, tmp_path: Path) -> Iterator[RayJob]:
    """A bench; after the test no process of a job is left, and Ray has all its room back."""
    made = RayJob(ray_hosts, tmp_path)
    yield made
    made.close()
    ray_hosts.wait_until_free()


def test_all_reduce_on_the_nodes_that_ray_chooses(bench: RayJob):
    code, text = bench.run("-n", "3", "--placement", "spread", steps=25)
    assert code == 0, text
    assert bench.hosts_of_workers() == ["a", "b", "c"]
    weights = {line.partition("weights ")[2] for line in bench.lines if "weights" in line}
    assert len(weights) == 1 and text.count("weights") == 3, text
    # What workers print is in the logs of Ray's actors as well.
    for name in "abc":
        found = bench.cluster[name].run(
            ["grep", "-rhc", "] weights ", f"{SESSIONS}/session_latest/logs"]
        )
        assert "1" in found.stdout.split(), name


def test_servers_with_two_copies_are_on_different_nodes(bench: RayJob):
    words = ["-n", "2", "-s", "2", "--replicas", "2", "--pace", "ssp:3"]
    code, text = bench.run(*words, steps=25)
    assert code == 0, text
    assert "replicas: the 2 copies of a value are on different hosts" in text
    assert text.count("weights") == 2


def test_two_jobs_share_the_cluster_and_do_not_meet(bench: RayJob, tmp_path: Path):
    (tmp_path / "other").mkdir()
    other = RayJob(bench.cluster, tmp_path / "other")
    bench.start("-n", "2", "--placement", "spread", steps=200)
    other.start("-n", "3", "--placement", "spread", on="b", steps=100)
    assert (bench.finish(), other.finish()) == (0, 0), bench.text + other.text
    first, second = ({x for x in one.lines if "weights" in x} for one in (bench, other))
    assert (len(first), len(second)) == (2, 3)
    assert not {x.split("] ")[1] for x in first} & {x.split("] ")[1] for x in second}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_cancelled_job_leaves_nothing(bench: RayJob, number: signal.Signals):
    bench.start("-n", "2", "-s", "1", "--pace", "ps", "--placement", "spread")
    bench.wait_for(lambda: len(bench.hosts_of_workers()) == 2)
    bench.send(number)
    assert bench.finish(within_s=20) in (128 + number, -number)


def test_one_report_for_each_wrong_input(bench: RayJob):
    cluster, begun_s = bench.cluster, time.monotonic()
    code, text = bench.run("-n", "30", "--wait", "6")
    assert code == 1 and text.count("they need CPU=30") == 2, text
    assert "the cluster of 3 nodes has CPU=12" in text and "waiting up to 6 s" in text
    assert time.monotonic() - begun_s < 25
    code, text = bench.run("-n", "1", env={"RAY_AUTH_MODE": "disabled"})
    assert code == 1 and "token is missing or wrong" in text, text
    code, text = bench.run("-n", "1", env={"RAY_AUTH_TOKEN_PATH": "/no/such/file"})
    assert code == 1 and "token is missing or wrong" in text, text
    code, text = bench.run("-n", "1", env={"RAY_ADDRESS": "10.99.0.1:6379"})
    assert code == 1 and "nothing answers at 10.99.0.1:6379" in text, text
    code, text = bench.run("-n", "1", on="d")
    assert code == 1 and "must be a node of that cluster" in text, text
    code, text = bench.run("-n", "1", on="d", env={"RAY_ADDRESS": ""})
    assert code == 1 and "no Ray cluster runs on this machine" in text, text
    code, text = bench.run("-n", "2", "--python", "/no/python")
    assert code == 1 and "has no Python at /no/python" in text, text
    bench.start("-n", "30")
    bench.wait_for_line("waiting up to 60 s")
    bench.send(signal.SIGINT)
    assert bench.finish(within_s=15) == 130 and "Traceback" not in bench.text, bench.text
    with cluster.claimed_version("2.59.0"):
        code, text = bench.run("-n", "1")
        assert code == 1 and "the Ray cluster runs Ray 2.59.0" in text, text
