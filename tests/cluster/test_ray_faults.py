"""Jobs on Ray that lose and gain nodes: others continue, Ray's room joins, the head may die."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster.ray_cluster import RayCluster
from support.cluster.ray_job import RayJob

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayCluster]:
    """Head on a, nodes b and c, each with room for two processes; d may become a node."""
    with RayCluster("a", "b", "c", spare=("d",), cpus=2) as made:
        yield made


@pytest.fixture
def bench(nodes: RayCluster, tmp_path: Path) -> Iterator[RayJob]:
    made = RayJob(nodes, tmp_path)
    yield made
    made.close()


def steps(bench: RayJob) -> int:
    """Return the last step that the display has shown."""
    found = re.findall(r"paceline: steps? (?:\d+ to )?(\d+)", bench.text)
    return int(found[-1]) if found else 0


def lost_on_c(bench: RayJob) -> list[str]:
    """Return the reports of processes that were lost with node c."""
    return re.findall(r"\(host c, pid \d+\) lost: .*", bench.text)


def test_a_node_dies_and_another_one_takes_its_processes(bench: RayJob):
    bench.start("-n", "4", "-s", "2", "--replicas", "2", "--pace", "ssp:3")
    bench.wait_for(lambda: len(bench.hosts_of_workers()) == 4)
    bench.wait_for(lambda: steps(bench) > 0)
    bench.cluster["c"].power_off()
    killed_s = time.monotonic()
    bench.wait_for(lambda: bool(lost_on_c(bench)))
    noticed_s = time.monotonic() - killed_s
    # Our own connection notices: Ray takes at least three health checks of 1 s, then a while.
    assert noticed_s < 5, bench.text
    bench.wait_for_line("waits until ray has room for it")
    before = steps(bench)
    bench.wait_for(lambda: steps(bench) > before)  # the others continue
    lost = len(lost_on_c(bench))
    bench.cluster.add_node(bench.cluster["d"])
    bench.wait_for_line("host 10.77.3.2 is in the job", within_s=60)
    bench.wait_for(lambda: len(re.findall(r"\(host d, pid \d+\) joined", bench.text)) >= 1)
    bench.wait_for(lambda: bench.text.count(" joined") >= lost)
    assert bench.stop() == 0, bench.text
    assert "restarting" not in bench.text
    bench.cluster.wait_until_free()


def test_workers_are_added_as_ray_has_room_and_the_room_is_given_back(bench: RayJob):
    room = 2 * bench.cluster.nodes
    bench.start("-n", "1", "--min", "1", "--max", "9")
    bench.wait_for(lambda: bench.hosts_of_workers() == sorted(room))
    scale = [bench.cluster.python, "-m", "paceline", "scale", "-n", "2"]
    scaled = bench.cluster.run("a", *scale, env=bench.own)
    assert scaled.returncode == 0, scaled.stderr
    bench.cluster.wait_until_room(len(room) - 2)
    assert bench.stop() == 0, bench.text
    bench.cluster.wait_until_free()


def test_training_outlives_the_head_as_long_as_ray_does(bench: RayJob):
    """The last test: the cluster has no head any more."""
    words = ["-n", "2", "--placement", "spread", "--resources", "CPU=1.5"]
    bench.cluster.fill(bench.cluster["a"])  # workers are on the other two
    bench.start(*words, on="b")
    bench.wait_for(lambda: len(bench.hosts_of_workers()) == 2)
    assert bench.hosts_of_workers() == bench.cluster.nodes[1:]
    bench.wait_for(lambda: steps(bench) > 0)
    bench.cluster["a"].kill()
    killed_s, before = time.monotonic(), steps(bench)
    bench.wait_for(lambda: steps(bench) > before + 50)  # nobody needs the head
    assert "lost" not in bench.text
    code = bench.finish(within_s=90)  # Ray ends its nodes after 12 s without a head
    assert time.monotonic() - killed_s > 8
    assert code != 0 and "Traceback" not in bench.text, bench.text
    for name in bench.cluster.nodes:
        bench.wait_for_idle(name)
