"""A host that dies costs its processes, and nothing else: no worker of another host is lost.

Each test starts real training on several hosts. An elastic job has to continue, a plain one has to
end with one report: the first cause, its host and its rank. The fixture `cluster` checks that
nothing is left on any host.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from support.cluster.host_job import TRAIN, HostJob
from support.cluster.ssh_cluster import SshCluster

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

PLAIN = "--hosts a:1,b:2,c:1"
CLOSED = "the co"  # the connection to its agent, or the command that runs it, ended
ELASTIC = "--hosts a:2,b:2,c:2 -n 3 --on-loss replace"  # worker 2 is alone on b
SERVERS_APART = "--hosts a:1,b:1,c:1 -n 2 -s 3 --replicas 2 --servers-on b,c --on-loss replace"


def start(
    cluster: SshCluster, directory: Path, options: str, steps: int = 80, script: str = TRAIN
) -> HostJob:
    """Start a job and wait until it trains."""
    words = [*options.split(), "--env", f"STEPS={steps}"]
    job = HostJob(cluster, directory, *words, script=script)
    job.wait_for("step 10")
    return job


def expect_only_lost(job: HostJob, host: str) -> None:
    """Wait for a good end; only processes of this host were lost, and all workers are done."""
    assert job.result() == 0, job.output
    assert job.losses and all(f"(host {host}" in line for line in job.losses), job.output
    assert sum("] done" in line for line in job.lines) == 3, job.output


def expect_host_lost(job: HostJob, host: str, ranks: str, why: str) -> None:
    """Wait for the end of a plain job; its report begins with the host, and a rank there."""
    assert job.result() == 137, job.output
    first, *others = ranks.split()
    (line,) = (line for line in job.lines if "failed first" in line)
    assert f"rank {first} failed first: host {host} is lost ({why}" in line, line
    assert f"on host {host}," in line
    for rank in others:
        assert f"rank {rank}: failed as well: host {host} is lost ({why}" in job.output


# -- the host dies ---------------------------------------------------------------------------------


def test_training_continues_when_all_processes_of_a_host_are_killed(
    cluster: SshCluster, tmp_path: Path
) -> None:
    """Its kernel lives on, and resets the connections: nobody has to wait for a timeout."""
    job = start(cluster, tmp_path, ELASTIC, steps=40)
    cluster["b"].kill()
    assert job.wait_for("worker 2 (host c") < 5  # its replacement
    expect_only_lost(job, "b")
    assert f"host b is lost ({CLOSED}" in job.output


@pytest.mark.cluster
def test_the_death_of_a_worker_host_costs_only_its_workers(
    cluster: SshCluster, tmp_path: Path
) -> None:
    job = start(cluster, tmp_path, ELASTIC)
    cluster["b"].power_off()
    expect_only_lost(job, "b")
    assert "host b is lost (no answer from it for 1.5 s" in job.output


@pytest.mark.cluster
@pytest.mark.parametrize("pace", ["ps", "async"])
def test_the_death_of_a_server_host_costs_no_worker(
    cluster: SshCluster, tmp_path: Path, pace: str
) -> None:
    """The new server becomes the primary of partitions that hold nothing, too: workers of other
    hosts never connect to it for those, and it must not wait for them."""
    job = start(cluster, tmp_path, f"{SERVERS_APART} --pace {pace}")
    cluster["c"].power_off()
    assert job.result() == 0, job.output
    assert [line for line in job.losses if "worker" in line] == [], job.output
    assert len(job.losses) == 1 and "server 1 (host c" in job.losses[0], job.output
    assert "done 0" in job.output and "done 1" in job.output


@pytest.mark.cluster
def test_a_plain_job_ends_with_the_first_host_that_is_lost(
    cluster: SshCluster, tmp_path: Path
) -> None:
    job = start(cluster, tmp_path, PLAIN)
    cluster["b"].kill()
    expect_host_lost(job, "b", "1 2", CLOSED)


# -- the network -----------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize(
    "options",
    [
        ELASTIC,
        f"{SERVERS_APART} --pace ps",
        f"{SERVERS_APART} --pace async",
        "--hosts a:1,b:1,c:1 -s 2 --pace async",
        "--hosts a:1,b:1,c:1",
    ],
)
def test_a_short_outage_costs_nothing(cluster: SshCluster, tmp_path: Path, options: str) -> None:
    job = start(cluster, tmp_path, options)
    cluster["b"].cut()
    time.sleep(1.0)
    cluster.mend()
    assert job.result() == 0, job.output
    assert job.losses == [], job.output


@pytest.mark.cluster
def test_a_host_that_was_cut_off_ends_its_processes_and_can_come_back(
    cluster: SshCluster, tmp_path: Path
) -> None:
    job = start(cluster, tmp_path, ELASTIC, steps=350)
    cut_s = time.monotonic()
    cluster["b"].cut()
    job.wait_for("worker 2 (host c")
    job.wait_until_gone("b")  # it cannot hear the launcher, and ends by itself
    time.sleep(max(0.0, cut_s + 10 - time.monotonic()))
    cluster.mend()
    added = job.paceline("hosts", "add", "b:2")
    assert added.returncode == 0 and "host b is in the job" in added.stdout, added
    listed = job.paceline("hosts").stdout
    assert "lost" not in listed and "c (2 slots): rank 2" in listed, listed
    expect_only_lost(job, "b")


@pytest.mark.cluster
def test_a_plain_job_ends_when_a_host_is_cut_off(cluster: SshCluster, tmp_path: Path) -> None:
    job = start(cluster, tmp_path, PLAIN)
    cluster["b"].cut()
    expect_host_lost(job, "b", "1 2", "no answer from it for 1.5 s")
    job.wait_until_gone("b")


@pytest.mark.cluster
@pytest.mark.parametrize("direction", [(0, 1), (1, 0)], ids=["from launcher", "to launcher"])
def test_one_direction_is_as_bad_as_both(
    cluster: SshCluster, tmp_path: Path, direction: tuple[int, int]
) -> None:
    job = start(cluster, tmp_path, ELASTIC)
    cluster.network.mute(*direction)
    expect_only_lost(job, "b")
    job.wait_until_gone("b")


# Too large for rank 0 to average alone: neighbours in the ring send to each other.
RING = TRAIN.replace("Linear(4, 1)", "Linear(4, 300_000)").replace("randn(8, 4)", "randn(1, 4)")


@pytest.mark.cluster
def test_a_replacement_avoids_a_host_that_another_cannot_reach(
    cluster: SshCluster, tmp_path: Path
) -> None:
    """Hosts b and c both reach the launcher. A worker on b would be lost again and again."""
    job = start(cluster, tmp_path, "--hosts a:1,b:1,c:2 -n 3 --on-loss replace", 30, RING)
    cluster.network.mute(1, 2)
    expect_only_lost(job, "b")
    assert len(job.losses) == 1 and "cannot reach it" in job.losses[0], job.output


@pytest.mark.cluster
def test_a_job_without_another_host_ends_when_one_cannot_be_reached(
    cluster: SshCluster, tmp_path: Path
) -> None:
    job = start(cluster, tmp_path, "--hosts a:1,b:1,c:1 --on-loss replace", 30, RING)
    cluster.network.mute(1, 2)
    assert job.result() == 137, job.output
    assert "3 losses (worker 1 3 times)" in job.output, job.output
    words = "the job ended: worker 1 and its replacements could not be reached 3 times"
    assert words in job.output, job.output


# -- stopped processes -----------------------------------------------------------------------------


@pytest.mark.cluster
def test_a_stopped_worker_is_the_first_line_of_the_report(
    cluster: SshCluster, tmp_path: Path
) -> None:
    job = start(cluster, tmp_path, PLAIN)
    job.signal(job.worker(3), signal.SIGSTOP)
    assert job.result() == 1, job.output
    report = [line for line in job.lines if "frozen" in line or "failed first" in line]
    assert "rank 3 was frozen" in report[0] and "on host c)" in report[0], job.output
    assert "PeerTimeout: rank 3 has not been heard for" in job.output


@pytest.mark.cluster
def test_a_stopped_worker_is_replaced(cluster: SshCluster, tmp_path: Path) -> None:
    job = start(cluster, tmp_path, ELASTIC, steps=120)
    job.signal(job.worker(2), signal.SIGSTOP)
    expect_only_lost(job, "b")
    assert "lost: its process has been stopped for" in job.losses[0]


@pytest.mark.cluster
def test_a_stopped_agent_is_reported_then_given_up_and_ends(
    cluster: SshCluster, tmp_path: Path
) -> None:
    job = start(cluster, tmp_path, ELASTIC, steps=800)
    agent = job.agent("b")
    job.signal(agent, signal.SIGSTOP)
    assert 4 < job.wait_for("the agent on host b has sent nothing for 5 s") < 10
    job.signal(agent, signal.SIGCONT)
    job.wait_for("the agent on host b answers again")
    job.wait_for("[2] step 200")  # the agent runs for seconds, and its guard sees it
    assert job.losses == []
    job.signal(agent, signal.SIGSTOP)
    job.wait_for("host b is lost (its agent has sent nothing for 30 s)")
    job.wait_until_gone("b", within_s=15)  # nobody continues the agent: its guard ends it
    expect_only_lost(job, "b")
