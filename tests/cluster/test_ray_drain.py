"""Ray drains a node: its processes hand over and leave before Ray ends it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster.ray_cluster import RayCluster
from support.cluster.ray_job import RayJob

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[RayJob]:
    """Head on a, where workers and servers have no room, nodes b, c and d with room for three."""
    with RayCluster("a", "b", "c", "d", cpus=3) as nodes:
        nodes.fill(nodes["a"])
        made = RayJob(nodes, tmp_path)
        yield made
        made.close()


def steps(bench: RayJob) -> int:
    """Return the last step that the display has shown."""
    found = re.findall(r"paceline: steps? (?:\d+ to )?(\d+)", bench.text)
    return int(found[-1]) if found else 0


DRAIN = """
import ray, subprocess, sys
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
(node,) = (n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == sys.argv[1])
words = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
command = ["ray", "drain-node", "--node-id", node, *words, "--deadline-remaining-seconds", "60"]
sys.exit(subprocess.run(command).returncode)
"""


def test_a_node_that_ray_drains_hands_over_before_it_ends(bench: RayJob):
    bench.start("-n", "2", "-s", "2", "--placement", "spread", "--pace", "ps", "--min", "1")
    bench.wait_for(lambda: len(bench.hosts_of_workers()) == 2)
    bench.wait_for(lambda: steps(bench) > 0)
    cluster, host = bench.cluster, bench.hosts_of_workers()[-1]
    done = cluster["a"].run(
        [cluster.python, "-c", DRAIN, cluster[host].address], env=cluster.environ
    )
    assert done.returncode == 0, done.stderr
    bench.wait_for_line(f"host {cluster[host].address} goes away in ")
    bench.wait_for_line("Ray drains its node")
    bench.wait_for_line(f"host {cluster[host].address} has left after", within_s=60)
    assert " lost: " not in bench.text, bench.text
    assert "no step is repeated" in bench.text, bench.text
    before = steps(bench)
    bench.wait_for(lambda: steps(bench) > before + 5)
    assert bench.stop() == 0, bench.text
    cluster["c"].power_off()  # it takes no work any more until it starts again
