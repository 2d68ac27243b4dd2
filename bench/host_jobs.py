"""Whole jobs on three hosts with a real sshd each: start, loss of a host, and what is left behind.

    sudo python bench/host_jobs.py                        # start and host death
    sudo python bench/host_jobs.py --starts 50            # also so many jobs of 3 x 8 processes
    sudo python bench/host_jobs.py --quick

The hosts are namespaces on this machine, so all of them share its cores. "start" is the time from
the command until the last worker has made its first step, local and over ssh in turns. "host death"
is the time from the moment at which a host's network and processes vanish until each worker that is
left has made a step that began afterwards.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import figures
from harness.namespaces import can_shape
from harness.report import machine, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.cluster.host_job import HostJob
from support.cluster.ssh_cluster import SshCluster

_FIRST_STEP = """
import time
import torch
import paceline as pl
pl.init()
model = torch.nn.Linear(8, 8)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
print("up", time.time(), flush=True)
"""
_STEPS = """
import time
import torch
import paceline as pl
pl.init()
model = torch.nn.Linear(8, 8)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in pl.steps(600):
    began = time.time()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", pl.rank(), began, time.time(), flush=True)
    time.sleep(0.02)
"""
_JOBS = {"local": "-n 3", "over ssh": "--hosts a:1,b:1,c:1"}
# What dies is host c: a worker, or a server that has a copy of every value.
_DEATHS = {
    "allreduce": "--hosts a:1,b:1,c:1 --min 2 --on-loss shrink",
    "ps, two copies": "--hosts a:1,b:1,c:1 -n 2 -s 2 --servers-on b,c --replicas 2 --pace ps"
    " --on-loss shrink",
}
_SPAWN = "import paceline as pl; pl.init(); pl.world().barrier()"
Times = dict[str, list[float]]


def run(cluster: SshCluster, options: str, script: str) -> HostJob:
    """Start a job in a directory of its own, which all hosts see."""
    directory = Path(tempfile.mkdtemp(dir=cluster.directory))
    return HostJob(cluster, directory, *options.split(), "--log-dir", "none", script=script)


def words(job: HostJob, first: str) -> list[list[str]]:
    """Return what workers have printed behind this word, whole lines only."""
    lines = [line.split(f"{first} ", 1)[1].split() for line in job.lines if f"{first} " in line]
    return [line for line in lines if line]


def measure_start(cluster: SshCluster, rounds: int) -> Times:
    """Return the seconds to the first step, local and over ssh, in turns."""
    found: Times = {label: [] for label in _JOBS}
    for number in range(-1, rounds):  # the first one fills caches and is not counted
        for label, options in _JOBS.items():
            began_s = time.time()
            job = run(cluster, options, _FIRST_STEP)
            if job.result():
                raise SystemExit(f"host_jobs: {label}: a job failed:\n{job.output}")
            up_s = [float(at_s) for at_s, *_ in words(job, "up")]
            assert len(up_s) == 3, job.output
            if number >= 0:
                found[label].append(max(up_s) - began_s)
    return found


def measure_death(cluster: SshCluster, rounds: int) -> Times:
    """Return the seconds from the death of a host to the next step of all that are left."""
    found: Times = {label: [] for label in _DEATHS}
    for _ in range(rounds):
        for label, options in _DEATHS.items():
            job = run(cluster, options, _STEPS)
            job.wait_for("step ")
            time.sleep(1.0)  # in the middle of training
            died_s = time.time()
            cluster["c"].power_off()
            found[label].append(_next_step(job, died_s) - died_s)
            job.interrupt()
            job.result()
            cluster.mend()
    return found


def _next_step(job: HostJob, died_s: float) -> float:
    """Return when two workers had each finished a step that they began after the death."""
    deadline_s = time.monotonic() + 60
    while True:
        ended: dict[str, float] = {}
        for line in words(job, "step"):
            if len(line) == 3 and float(line[1]) > died_s + 0.1:
                ended.setdefault(line[0], float(line[2]))
        if len(ended) >= 2:
            return max(ended.values())
        if time.monotonic() > deadline_s:
            raise SystemExit(
                f"host_jobs: no worker continued after the death of a host:\n{job.output}"
            )
        time.sleep(0.02)


def count_left(cluster: SshCluster, starts: int) -> int:
    """Start and end jobs of 3 x 8 processes; return how many processes and segments remain."""
    left = 0
    for number in range(starts):
        job = run(cluster, "--hosts a:8,b:8,c:8", _SPAWN)
        if job.result():
            raise SystemExit(f"host_jobs: start {number} failed:\n{job.output}")
        for host in cluster.hosts:
            job.wait_until_gone(host.name)
            left += len(host.run(["sh", "-c", "ls /dev/shm | grep paceline"]).stdout.split())
        print(f"\r  start {number + 1} of {starts}: {left} left", end="", flush=True)
    print()
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="0: only --starts")
    parser.add_argument("--starts", type=int, default=0, help="jobs of 3 x 8 processes")
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args()
    if why := can_shape():
        raise SystemExit(f"host_jobs: cannot run here: {why}")
    rounds = 1 if options.quick else options.rounds
    facts = machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    with SshCluster("a", "b", "c") as cluster:
        times = {**measure_start(cluster, rounds), **measure_death(cluster, rounds)}
        left = count_left(cluster, options.starts) if options.starts else None

    def text(label: str) -> str:
        return f"{min(times[label]):.2f} s by minimum, {statistics.median(times[label]):.2f} median"

    rows = []
    if rounds:
        local, remote = (statistics.median(times[label]) for label in _JOBS)
        rows = [
            ("start of 3 workers, local", "", text("local")),
            ("the same over ssh", f"must {1.5 * local + 2:.2f} s", text("over ssh")),
            ("over ssh / local", "", f"{remote / local:.2f} by median"),
            *((f"host death to next step, {label}", "must 3 s", text(label)) for label in _DEATHS),
        ]
    if left is not None:
        rows.append((f"{options.starts} starts of 3 x 8", "must 0 left", f"{left} left"))
    figures.show(rows)
    content = {"machine": facts, "times_s": times, "starts": options.starts, "left": left}
    print(f"written to {write_json('host-jobs', content)}")


if __name__ == "__main__":
    main()
