"""The commands of printed manifests, run in pods without Kubernetes: real jobs, real losses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.kubernetes.pod_cluster import PodCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
TRAIN = """
import os, sys, time
import torch, paceline as pl

pl.init()
model = torch.nn.Linear(4, 1)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
for step in range(30):
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
print("done", pl.rank(), os.uname().nodename, os.getuid(), sys.argv[1:], flush=True)
"""


@contextmanager
def pods_of(tmp_path: Path, script: str, *options: str) -> Iterator[PodCluster]:
    """Print the manifests of a job, and make its pods."""
    image = tmp_path / "image"
    image.mkdir(mode=0o755)
    (image / "train.py").write_text(script)
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o777)
    command = [sys.executable, "-m", "paceline", "run", "--on", "kubernetes", "--image", "i:1"]
    fixed = ["--name", "train", "--python", sys.executable, "-o", "json"]
    done = subprocess.run(
        [*command, *fixed, *options], cwd=image, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    with PodCluster(json.loads(done.stdout)["items"], image, tmp_path) as pods:
        yield pods


@pytest.mark.parametrize("flavour", ["jobset", "job", "trainjob"])
def test_a_job_with_servers_finishes_in_pods(tmp_path: Path, flavour: str) -> None:
    options = ("--flavour", flavour, "-n", "3", "-N", "2", "-s", "1", "--pace", "ps")
    with pods_of(tmp_path, TRAIN, *options, "train.py", "$(HOME)") as pods:
        late = pods.pods[1]  # pods start in any order
        for pod in pods.pods[2:]:
            pods.start(pod)
        launcher = pods.pods[0]
        pods.start(launcher)
        launcher.wait_for("waiting for kubernetes to start agents on")
        pods.start(late)
        launcher.wait_for("pace ps from the command line")
        for pod in pods.pods:
            assert pod.look().returncode == 0, pod.look().stderr
        assert launcher.wait(60) == 0, pods.outputs()
        worker = {"jobset": "train-worker-0-", "job": "train-", "trainjob": "train-node-0-"}
        first = worker[flavour] + ("1" if flavour == "job" else "0")
        assert f"done 0 {first} 1000 ['$(HOME)']" in launcher.output
        assert "(0 slots): server 0" in launcher.output
        # The program of a pod outlives the job: it never ends with exit code 0.
        late.signal(signal.SIGTERM)
        assert late.wait(20) == 128 + signal.SIGTERM


def test_what_a_probe_sees(tmp_path: Path) -> None:
    with pods_of(tmp_path, TRAIN, "--flavour", "job", "train.py") as pods:
        pod = pods.pods[1]
        pods.start(pod)
        pod.wait_for("waits for the launcher of job train")
        deadline_s = time.monotonic() + 10
        while pod.look().returncode != 0:
            assert time.monotonic() < deadline_s, pod.look().stderr
        os.kill(pod.process, signal.SIGSTOP)
        seen = pod.look()
        assert seen.returncode == 1 and "is stopped" in seen.stderr
        os.kill(pod.process, signal.SIGCONT)
        assert pod.look().returncode == 0


def test_pods_that_can_never_run(tmp_path: Path) -> None:
    options = ("--flavour", "job", "train.py")
    with pods_of(tmp_path, TRAIN, *options) as pods:
        pod = pods.pods[1]
        (container,) = pod.plan.spec["containers"]
        python = container["command"].index(sys.executable)
        container["command"][python] = "/usr/bin/python3"  # which has no Paceline
        pods.start(pod)
        assert pod.wait(20) == 2
        assert "the image i:1 has no Paceline for /usr/bin/python3; add it" in pod.output
        container["command"][python] = "/nowhere/python"
        pods.start(pod)
        assert pod.wait(20) == 2
        assert "the image i:1 has no /nowhere/python; name its interpreter" in pod.output
        container["command"][python] = sys.executable
        pods._secrets["train"]["secret"] = "short"
        pods.start(pod)
        assert pod.wait(20) == 2
        assert "does not hold 64 hexadecimal digits" in pod.output


def test_a_launcher_with_another_secret_is_refused(tmp_path: Path) -> None:
    with pods_of(tmp_path, TRAIN, "--flavour", "job", "train.py") as pods:
        launcher, worker = pods.pods
        pods.start(worker)
        worker.wait_for("waits for the launcher")
        pods._secrets["train"]["secret"] = "00" * 32
        pods.start(launcher)
        assert launcher.wait(30) == 1
        assert "not the pod of job train with our secret" in launcher.output
        assert "its agent starts" not in worker.output


ELASTIC = """
import os, pathlib, time
import torch, paceline as pl

pl.init()
model = torch.nn.Linear(4, 1)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
name, step = os.uname().nodename, 0
while not pathlib.Path("/run/data/finish").exists():
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 10 == 0:
        print(name, "step", step, "of", pl.world_size(), flush=True)
    time.sleep(0.02)
print("done", pl.rank(), name, flush=True)
"""


@pytest.mark.parametrize("on_loss", ["replace", "shrink"])
def test_replacements_of_pods_join_the_running_job(tmp_path: Path, on_loss: str) -> None:
    """The pod of a worker dies, later that of a server: nobody else is lost, and both return."""
    elastic = ("--min", "1", "--on-loss", on_loss, "--replicas", "2", "--volume", "data:/run/data")
    options = ("--flavour", "jobset", "-n", "2", "-s", "2", "--pace", "ps", *elastic)
    with pods_of(tmp_path, ELASTIC, *options, "train.py") as pods:
        pods.start_all()
        launcher = pods.pod("train-coordinator-0-0")
        launcher.wait_for("train-worker-0-1 step 20 of 2", 90)
        lose_and_replace(pods, "train-worker-0-1")
        steps = launcher.output.count("train-worker-0-1 step ")
        deadline_s = time.monotonic() + 60
        while launcher.output.count("train-worker-0-1 step ") < steps + 3:
            assert time.monotonic() < deadline_s, pods.outputs()
            time.sleep(0.1)
        lose_and_replace(pods, "train-server-0-1")
        (tmp_path / "data" / "finish").touch()
        assert launcher.wait(60) == 0, pods.outputs()
        lines = launcher.output.splitlines()
        lost = re.findall(r"(\w+ \d+) \(host \S+ pid \d+\) lost: ", launcher.output)
        assert set(lost) == {"worker 1", "server 1"}, pods.outputs()
        finished = [line for line in lines if "done " in line]
        assert sorted(line.split()[-1] for line in finished) == [
            "train-worker-0-0",
            "train-worker-0-1",
        ]


def lose_and_replace(pods: PodCluster, name: str) -> None:
    """Let a pod die without any farewell, and its replacement come as soon as that is noticed."""
    launcher = pods.pod("train-coordinator-0-0")
    pods.pod(name).host.power_off()
    launcher.wait_for(f"host {name}.train is lost", 30)
    pods.replace(name)
    launcher.wait_for(f"host {name}.train is in the job", 60)


SAVING = """
import time
import torch, paceline as pl

pl.init()
model = torch.nn.Linear(4, 1)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
checkpoint = pl.Checkpoint("/run/data/saved", every=1000)
print("begins at", checkpoint.steps, flush=True)
while checkpoint.steps < 100:
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    checkpoint.step()
    if checkpoint.steps == 10:
        print("step 10", flush=True)
print("finished", flush=True)
"""


def test_sigterm_becomes_a_checkpoint_and_the_next_coordinator_resumes(tmp_path: Path) -> None:
    options = ("--flavour", "job", "-n", "2", "--volume", "data:/run/data")
    with pods_of(tmp_path, SAVING, *options, "train.py") as pods:
        pods.start_all()
        launcher, worker = pods.pods[:2]
        launcher.wait_for("step 10", 90)
        worker.signal(signal.SIGTERM)  # the node of a worker is drained
        assert launcher.wait(60) == 75, pods.outputs()
        assert worker.wait(20) == 128 + signal.SIGTERM
        pods.replace(worker.plan.name)
        pods.replace(launcher.plan.name)
        assert launcher.wait(90) == 0, pods.outputs()
        assert re.findall(r"begins at (\d+)", launcher.output)[-1] != "0", launcher.output
        assert "finished" in launcher.output


def test_an_elastic_job_continues_without_a_drained_pod(tmp_path: Path) -> None:
    options = ("--flavour", "jobset", "-n", "2", "--min", "1", "--volume", "data:/run/data")
    with pods_of(tmp_path, ELASTIC, *options, "train.py") as pods:
        pods.start_all()
        launcher, worker = pods.pods[0], pods.pod("train-worker-0-1")
        launcher.wait_for("train-worker-0-1 step 20 of 2", 90)
        worker.signal(signal.SIGTERM)
        assert worker.wait(30) == 128 + signal.SIGTERM, pods.outputs()
        launcher.wait_for("host train-worker-0-1.train has left after", 10)
        pods.replace("train-worker-0-1")
        launcher.wait_for("host train-worker-0-1.train is in the job", 60)
        (tmp_path / "data" / "finish").touch()
        assert launcher.wait(60) == 0, pods.outputs()
