"""Real training on several hosts, started by one command over ssh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cluster.ssh_cluster import SshCluster

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

# Trains until the file `stop` exists; prints where it runs as one line of JSON.
SCRIPT = """
import json, os, socket, sys, time
import torch
import paceline as pl

pl.init()
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "PACELINE_BIND")
facts = {name: os.environ[name] for name in names}
print(json.dumps({**facts, "host": socket.gethostname(), "argv": sys.argv[1:]}), flush=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
data = torch.Generator().manual_seed(pl.rank())
for step in range(int(os.environ["STEPS"])):
    if step >= 20 and os.path.exists("stop"):
        break
    model(torch.randn(8, 4, generator=data)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
print("weights", model.weight.sum().item(), flush=True)
"""


class Bench:
    """A directory that all hosts see, and commands on the hosts."""

    def __init__(self, cluster: SshCluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        (directory / "train.py").write_text(SCRIPT)
        self.own = {"XDG_RUNTIME_DIR": str(directory)}  # commands see no job of another test
        self.lines: list[str] = []
        self.reader = threading.Thread()  # of the last job's output

    def start(self, *arguments: str, on: str = "a", steps: int = 25) -> subprocess.Popen[str]:
        verb, *rest = arguments
        command = [sys.executable, "-m", "paceline", verb, "--env", f"STEPS={steps}", *rest]
        # `cd` on the host: entering its namespaces changes the working directory.
        shell = ["env", "-C", str(self.directory), *command]
        started = self.cluster[on].popen(
            shell, env=self.own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines = []
        self.reader = threading.Thread(target=self._read, args=(started,), daemon=True)
        self.reader.start()
        return started

    def _read(self, started: subprocess.Popen[str]) -> None:
        lines = self.lines
        assert started.stdout is not None
        with started.stdout:
            for line in started.stdout:
                lines.append(line.rstrip())

    def run(self, *arguments: str, on: str = "a", steps: int = 25) -> tuple[int, str]:
        code = self.start(*arguments, on=on, steps=steps).wait(timeout=120)
        self.reader.join(timeout=10)
        return code, "\n".join(self.lines)

    def wait_for(self, is_true: Callable[[], bool], within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while not is_true():
            assert time.monotonic() < deadline, "\n".join(self.lines)
            time.sleep(0.05)

    def wait_for_line(self, text: str, within_s: float = 60) -> None:
        self.wait_for(lambda: any(text in line for line in self.lines), within_s)

    @property
    def where(self) -> list[dict[str, object]]:
        """What the workers printed about themselves, by rank."""
        found = [json.loads(line.partition("] ")[2]) for line in self.lines if '"RANK"' in line]
        return sorted(found, key=lambda one: int(str(one["RANK"])))


@pytest.fixture
def bench(cluster: SshCluster, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(cluster, tmp_path)
    yield made
    if made.reader.is_alive():
        made.reader.join(timeout=30)


def test_one_command_trains_on_three_hosts(bench: Bench) -> None:
    odd = ["it's $(touch x) `id`", "zwei\nZeilen", "ä 中", "--flag=a b"]
    code, text = bench.run("run", "--hosts", "a:2,b:1,c:1", "train.py", *odd)
    assert code == 0, text
    where = bench.where
    assert [one["host"] for one in where] == ["a", "a", "b", "c"]
    assert [one["LOCAL_RANK"] for one in where] == ["0", "1", "0", "0"]
    assert [one["GROUP_RANK"] for one in where] == ["0", "0", "1", "2"]
    addresses = [bench.cluster[name].address for name in "aabc"]
    assert [one["PACELINE_BIND"] for one in where] == addresses
    assert {one["MASTER_ADDR"] for one in where} == {addresses[0]}
    assert all(one["argv"] == odd for one in where)
    sums = {line.partition("weights ")[2] for line in bench.lines if "weights" in line}
    assert len(sums) == 1, text  # all-reduce: every worker has the same parameters
    assert "a (2 slots): ranks 0-1" in text and "c (1 slot): rank 3" in text
    assert not (bench.directory / "x").exists()


@pytest.mark.cluster
def test_a_new_engine_is_one_file(bench: Bench, tmp_path: Path) -> None:
    """Agents get onto the hosts without ssh; everything else is the same."""
    engine = str(Path(__file__).with_name("spool_engine.py"))
    serving = [
        bench.cluster[name].popen([sys.executable, engine, "serve", str(tmp_path / name)])
        for name in "bc"
    ]
    try:
        bench.wait_for(lambda: all((tmp_path / name).exists() for name in "bc"))
        words = [sys.executable, engine, "run", str(tmp_path), "--hosts", "a:1,b:1,c:1"]
        command = ["env", "-C", str(bench.directory), *words, "--env", "STEPS=25", "train.py"]
        done = bench.cluster["a"].run(command, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("weights") == 3
    finally:
        for one in serving:
            os.kill(bench.cluster["b"].pid_of(one), signal.SIGKILL)
            one.wait()


def test_every_problem_of_every_host_is_in_one_report(bench: Bench) -> None:
    hosts = ["--hosts", "a:1,b:1,nowhere:1,elsewhere:1"]
    code, text = bench.run("run", *hosts, "--python", "/no/python", "train.py")
    assert code == 1
    assert "3 hosts cannot run the job; nothing was started" in text
    assert "nowhere" in text and "elsewhere" in text and "has no Python at /no/python" in text
    code, text = bench.run("run", "--hosts", "a:1,b:0", "train.py")
    assert code == 2 and "b:0" in text
    code, text = bench.run("run", "--hosts", "a:1,b:1", "-n", "3", "train.py")
    assert code == 2 and "the hosts have 2 slots" in text


def test_a_killed_launcher_leaves_nothing_on_any_host(bench: Bench) -> None:
    job = bench.start("run", "--hosts", "a:1,b:1", "train.py", steps=5000)
    bench.wait_for(lambda: len(bench.where) == 2)
    os.kill(bench.cluster["a"].pid_of(job), signal.SIGKILL)
    job.wait(timeout=20)
    bench.cluster.wait_until_idle(within_s=20)  # ssh keeps its shared connection for 5 s


def test_the_first_failure_is_reported_with_its_host(bench: Bench) -> None:
    job = bench.start("run", "--hosts", "a:1,b:1", "train.py", steps=5000)
    bench.wait_for(lambda: len(bench.where) == 2)
    (worker,) = (p for p in bench.cluster["b"].processes() if p.environ.get("RANK") == "1")
    os.kill(worker.pid, signal.SIGKILL)
    assert job.wait(timeout=60) == 137
    bench.wait_for_line("rank 1 failed first: killed by SIGKILL")
    assert any("on host b" in line for line in bench.lines)


@pytest.mark.cluster
def test_an_elastic_job_outlives_a_host_and_takes_another(bench: Bench) -> None:
    hosts = ["--hosts", "a:1,b:1", "--on-loss", "replace"]
    job = bench.start("run", *hosts, "train.py", steps=100_000)
    bench.wait_for(lambda: len(bench.where) == 2)
    hosts = [sys.executable, "-m", "paceline", "hosts"]
    added = bench.cluster["a"].run([*hosts, "add", "c:1"], env=bench.own)
    assert added.returncode == 0 and "host c is in the job" in added.stdout, added
    bench.cluster["b"].power_off()
    bench.wait_for_line("host b is lost")
    bench.wait_for_line("worker 1 (host c")
    listed = bench.cluster["a"].run(hosts, env=bench.own).stdout
    assert "b (1 slot): no process; lost" in listed and "c (1 slot): rank 1" in listed
    (bench.directory / "stop").touch()
    assert job.wait(timeout=60) == 0, "\n".join(bench.lines)
