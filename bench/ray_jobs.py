"""Whole jobs on a Ray cluster: start, death of a node, and the training step against ssh.

    sudo python bench/hosts.py --engine ray [--quick]     # needs `make .venv-ray/bin/ray`

The nodes are namespaces on this machine, so all of them share its cores. "start" is the time from
the command until the last worker has made its first step, with the cluster up. "node death" is the
time from the moment at which a node vanishes until each worker that is left has made a step that
began afterwards. The training step is the median of two workers on two hosts, in turns with the
same job over ssh.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import figures
from harness.report import machine, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.cluster.host_job import HostJob
from support.cluster.ray_cluster import RayCluster
from support.cluster.ray_job import RayJob
from support.cluster.ssh_cluster import SshCluster

_STEPS = """
import os, time
import torch
import paceline as pl
pl.init()
size = int(os.environ.get("SIZE", "8"))
model = torch.nn.Linear(size, size)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
pause = float(os.environ.get("PAUSE", "0"))
shown = []
for step in pl.steps(int(os.environ["COUNT"])):
    began = time.time()
    model(torch.ones(4, size)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    shown.append(f"step {pl.rank()} {began} {time.time()}")
    if pause:
        print(shown.pop(), flush=True)
    time.sleep(pause)
print(*shown, sep="\\n", flush=True)  # not in the steps: what is printed costs both jobs time
"""


def _job(cluster: RayCluster, words: str, **env: object) -> RayJob:
    job = RayJob(cluster, Path(tempfile.mkdtemp(dir=cluster.directory)))
    (job.directory / "train.py").write_text(_STEPS)
    settings = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    job.start(*words.split(), *settings)
    return job


def _steps(lines: list[str]) -> list[tuple[str, float, float]]:
    """Return rank, begin and end of the steps that workers have printed."""
    words = [line.split("] step ", 1)[1].split() for line in lines if "] step " in line]
    return [(one[0], float(one[1]), float(one[2])) for one in words if len(one) == 3]


def measure_start(cluster: RayCluster, rounds: int) -> list[float]:
    """Return the seconds from the command to the first step of both workers."""
    found = []
    for number in range(-1, rounds):  # the first one fills caches and is not counted
        began_s = time.time()
        job = _job(cluster, "-n 2 --placement spread", COUNT=1)
        if job.finish(120):
            raise SystemExit(f"ray: a job failed:\n{job.text}")
        if number >= 0:
            found.append(max(end for _, _, end in _steps(job.lines)) - began_s)
    return found


def measure_death(cluster: RayCluster, rounds: int) -> list[float]:
    """Return the seconds from the death of a node to the next step of the worker that is left."""
    found = []
    for _ in range(rounds):
        job = _job(cluster, "-n 2 --placement spread --min 1", COUNT=100000, PAUSE=0.02)
        job.wait_for(lambda job=job: len(_steps(job.lines)) > 40, 120)
        died_s = time.time()
        cluster["b"].power_off()
        after: list[float] = []
        while not after and time.time() < died_s + 60:
            time.sleep(0.02)
            after = [end for _, began, end in _steps(list(job.lines)) if began > died_s + 0.1]
        if not after:
            raise SystemExit(f"ray: no worker continued after the death of a node:\n{job.text}")
        found.append(min(after) - died_s)
        job.close()
        cluster.mend()
    return found


def measure_step(ray: RayCluster, ssh: SshCluster, rounds: int) -> dict[str, list[float]]:
    """Return median step times over Ray and over ssh, in turns."""
    found: dict[str, list[float]] = {"ray": [], "ssh": []}
    for _ in range(rounds):
        # One thread each: Ray allows a worker as many as it has CPUs, ssh all cores of the host.
        job = _job(ray, "-n 2 --placement spread --threads-per-worker 1", COUNT=300, SIZE=512)
        if job.finish(180):
            raise SystemExit(f"ray: a job failed:\n{job.text}")
        directory = Path(tempfile.mkdtemp(dir=ssh.directory))
        options = "--hosts a:1,b:1 --threads-per-worker 1 --env COUNT=300 --env SIZE=512"
        other = HostJob(ssh, directory, *options.split(), script=_STEPS)
        if other.result():
            raise SystemExit(f"ray: a job over ssh failed:\n{other.output}")
        for name, lines in (("ray", job.lines), ("ssh", other.lines)):
            times = [end - began for _, began, end in _steps(lines)][100:]
            found[name].append(statistics.median(times))
    return found


def main(*, quick: bool) -> None:
    facts, rounds = machine(), 1 if quick else 3
    with RayCluster("a", "b", cpus=1) as cluster:
        start_s = measure_start(cluster, rounds)
        print(f"command to first step: {start_s}", flush=True)
        with SshCluster("a", "b") as ssh:
            step_s = measure_step(cluster, ssh, rounds)
        print(f"training step: {step_s}", flush=True)
        death_s = measure_death(cluster, rounds)
        print(f"node death: {death_s}", flush=True)
    ratio = min(step_s["ssh"]) / min(step_s["ray"])
    figures.show(
        [
            ("command to first step, 2 nodes", "must 15 s, goal 8 s", f"{max(start_s):.1f} s"),
            ("node death to next step", "must 15 s, goal 3 s", f"{max(death_s):.1f} s"),
            ("training step, speed against ssh", "must 0.97", f"{ratio:.2f}"),
        ],
        "Figures, each at its worst; the step at its best",
    )
    content = {"machine": facts, "start_s": start_s, "death_s": death_s, "step_s": step_s}
    print(f"written to {write_json('ray', content)}")
