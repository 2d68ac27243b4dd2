"""A host that dies costs its processes, and nothing else: no worker of another host is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support.cluster.ssh_cluster import SshCluster

pytestmark = pytest.mark.cluster

TRAIN = """
import time
import torch, paceline as pl
pl.init()
model = torch.nn.Linear(4, 1)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
for step in range(80):
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
    time.sleep(0.05)
print("done", pl.rank(), flush=True)
"""


class HostJob:
    """`paceline run` on host a, and what it has printed so far."""

    def __init__(self, cluster: SshCluster, directory: Path, *options: str) -> None:
        script = directory / "train.py"
        script.write_text(TRAIN)
        command = [sys.executable, "-m", "paceline", "run", *options, str(script)]
        self._process = cluster["a"].popen(
            command,
            cwd=str(directory),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            self.lines.extend(printed)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Wait until the job has printed a text."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.output:
            assert self._reader.is_alive() and time.monotonic() < deadline_s, self.output
            time.sleep(0.02)

    def result(self, timeout_s: float = 120) -> int:
        """Wait for the end of the job; return its exit code."""
        self._reader.join(timeout_s)
        if self._reader.is_alive():
            self._process.kill()
        return self._process.wait()


def lost(job: HostJob) -> list[str]:
    """Return the lines that announce a loss, once each."""
    return [line for line in job.lines if ") lost: " in line and "replacement (pid" not in line]


SERVERS_APART = "--hosts a:1,b:1,c:1 -n 2 -s 3 --replicas 2 --servers-on b,c --on-loss replace"
ELASTIC = "--hosts a:2,b:2,c:2 -n 3 --on-loss replace"


@pytest.mark.parametrize("pace", ["ps", "async"])
def test_the_death_of_a_server_host_costs_no_worker(
    cluster: SshCluster, tmp_path: Path, pace: str
) -> None:
    """The new server becomes the primary of partitions that hold nothing, too: workers of other
    hosts never connect to it for those, and it must not wait for them."""
    job = HostJob(cluster, tmp_path, *SERVERS_APART.split(), "--pace", pace)
    job.wait_for("step 10")
    cluster["c"].power_off()
    assert job.result() == 0, job.output
    assert [line for line in lost(job) if "worker" in line] == [], job.output
    assert len(lost(job)) == 1 and "server 1 (host c" in lost(job)[0], job.output
    assert "done 0" in job.output and "done 1" in job.output


def test_the_death_of_a_worker_host_costs_only_its_workers(
    cluster: SshCluster, tmp_path: Path
) -> None:
    job = HostJob(cluster, tmp_path, *ELASTIC.split())
    job.wait_for("step 10")
    cluster["b"].power_off()
    assert job.result() == 0, job.output
    assert lost(job) and all("(host b" in line for line in lost(job)), job.output


@pytest.mark.parametrize("options", [ELASTIC, f"{SERVERS_APART} --pace ps"])
def test_a_short_outage_costs_nothing(cluster: SshCluster, tmp_path: Path, options: str) -> None:
    job = HostJob(cluster, tmp_path, *options.split())
    job.wait_for("step 10")
    cluster["b"].cut()
    time.sleep(1.0)
    cluster.mend()
    assert job.result() == 0, job.output
    assert lost(job) == [], job.output
