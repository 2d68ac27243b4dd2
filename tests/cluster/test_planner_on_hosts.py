"""The planner on several hosts, over real ssh and shaped links: `plan`, pace auto, --max-wire."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support.cluster.host import Host
from support.cluster.ssh_cluster import SshCluster

pytestmark = [pytest.mark.root, pytest.mark.cluster, pytest.mark.timeout(240)]

# 540 kB of gradients.
SCRIPT = """
import pathlib, sys, time
import torch
import paceline as pl

job = pl.init()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 256), torch.nn.Linear(256, 500), torch.nn.Linear(500, 2)
)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), 0.001))
for _ in pl.steps(int(sys.argv[1])):
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    pathlib.Path(f"step-{pl.rank()}").write_text(f"{job.steps_done}")
    time.sleep(float(sys.argv[2]))
print("sum", sum(p.detach().double().sum().item() for p in model.parameters()), flush=True)
"""


def shape(host: Host, mbit: int) -> None:
    """Limit what a host sends; 0: no limit."""
    way = ["tc", "qdisc"]
    limit = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "100ms"]
    done = (
        host.run([*way, "replace", "dev", "eth0", *limit])
        if mbit
        else host.run([*way, "del", "dev", "eth0", "root"])
    )
    assert done.returncode == 0, done.stderr


class Bench:
    """Commands on host a, in a directory that all hosts see."""

    def __init__(self, cluster: SshCluster, directory: Path) -> None:
        self.cluster, self.directory, self.lines = cluster, directory, list[str]()
        (directory / "train.py").write_text(SCRIPT)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = ["env", "-C", str(self.directory), f"XDG_RUNTIME_DIR={self.directory}"]
        started = self.cluster["a"].popen(
            [*command, sys.executable, "-m", "paceline", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines.clear()
        self.reader = threading.Thread(target=self._read, args=(started,), daemon=True)
        self.reader.start()
        return started

    def _read(self, started: subprocess.Popen[str]) -> None:
        assert started.stdout is not None
        with started.stdout:
            self.lines.extend(line.rstrip() for line in started.stdout)

    def finish(self, started: subprocess.Popen[str]) -> tuple[int, str]:
        code = started.wait(timeout=150)
        self.reader.join(timeout=10)
        return code, "\n".join(self.lines)

    def wait_for_step(self, step: int) -> None:
        path, deadline = self.directory / "step-0", time.monotonic() + 120
        while not path.exists() or int(path.read_text() or 0) < step:
            assert time.monotonic() < deadline, "\n".join(self.lines)
            time.sleep(0.05)


@pytest.fixture
def bench(cluster: SshCluster, tmp_path: Path) -> Bench:
    return Bench(cluster, tmp_path)


def test_a_plan_measures_hosts_that_are_elsewhere(bench: Bench) -> None:
    """The planner runs on a, and the job would run on b and c: only ssh leads there."""
    for name in ("b", "c"):
        shape(bench.cluster[name], 100)
    try:
        code, output = bench.finish(
            bench.start("plan", "--hosts", "b:1,c:1", "--steps", "5", "train.py", "300", "0.01")
        )
        assert code == 0, output
        link = re.search(r"2 workers on 2 hosts, \d+ cores each, slowest link ([\d.]+)mbit", output)
        assert link is not None and 80 < float(link[1]) < 101, output
        assert "recommended: paceline run -n 2 --hosts b:1,c:1 " in output
        assert "allreduce[compress=int8]" in output and "servers: " in output
        code, output = bench.finish(
            bench.start("plan", "--hosts", "b:1,nosuch:1", "train.py", "300", "0.01")
        )
        assert code == 2 and "links could not be measured" in output and "nosuch" in output
    finally:
        for name in ("b", "c"):
            shape(bench.cluster[name], 0)


def test_auto_follows_a_link_and_a_budget_is_kept(bench: Bench) -> None:
    hosts = [bench.cluster[name] for name in ("a", "b")]
    where = ["--hosts", "a:1,b:1", "--log-dir", "none"]
    started = bench.start("run", *where, "--pace", "auto", "train.py", "180", "0.01")
    bench.wait_for_step(40)  # after the first choice, and a meeting that knows the usual step
    for host in hosts:
        shape(host, 20)
    try:
        code, output = bench.finish(started)
        assert code == 0, output
        lines = re.findall(r"paceline: auto: (.*)", output)
        assert lines[0].startswith("allreduce: predicted "), lines
        assert lines[1].startswith("exact: equals one process"), lines
        assert re.match(
            r"the link between a and b has 1\d(\.\d)?mbit instead of [\d.]+\wbit, so:"
            r" allreduce\[compress=int8\]: predicted .* ms per step",
            lines[2],
        ), lines
        assert lines[3].startswith("changes the training: loss within 2 sd"), lines
        assert "pace allreduce[compress=int8] instead of allreduce" in output
        assert len(set(re.findall(r"sum (\S+)", output))) == 1, "all changed after the same step"
    finally:
        for host in hosts:
            shape(host, 0)
    (bench.directory / "step-0").unlink()
    # 540 kB in a step of at least 50 ms are up to 86 Mbit/s, and 8 in one of 540 ms.
    budget = ["--max-wire", "8mbit", "train.py", "90", "0.05"]
    code, output = bench.finish(bench.start("run", *where, *budget))
    assert code == 0, output
    found = re.findall(r"sends ([\d.]+) Mbit/s per host of at most 8 Mbit/s", output)
    assert found and float(found[-1]) <= 8, output
    assert re.search(r"after step 8: pace allreduce\[compress=\S+\] instead of allreduce", output)
    nothing = ["--max-wire", "1kbit", "train.py", "120", "0.05"]
    code, output = bench.finish(bench.start("run", *where, *nothing))
    assert code != 0, output
    assert re.search(r"--max-wire 0.001mbit: no pace sends so little; allreduce\[comp", output)
