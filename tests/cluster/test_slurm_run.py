"""`paceline run` with a real Slurm: submitted, inside an allocation, refused, and requeued."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.cluster.host_job import TRAIN

pytestmark = pytest.mark.cluster
PACELINE = [sys.executable, "-m", "paceline"]
SUM = """
import socket
import torch
import paceline as pl

pl.init()
total = torch.ones(3) * (pl.rank() + 1)
pl.world().all_reduce(total)
print(f"{socket.gethostname()} rank {pl.rank()} local {pl.local_rank()} sum {total[0]:g}")
"""
# A process as a data loader's: it lives until its worker closes its input.
WITH_CHILD = f"""
import atexit, os, subprocess
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
def end():
    child.stdin.close()
    print("child of rank", os.environ["RANK"], "ended with", child.wait(), flush=True)
atexit.register(end)
{TRAIN}
"""
RESUMABLE = """
import pathlib, time
import torch
import paceline as pl

pl.init()
model = torch.nn.Linear(4, 1)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3))
checkpoint = pl.Checkpoint("saved", every=1000)
began = checkpoint.steps
print(f"begins at {began}", flush=True)
while checkpoint.steps < 100:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if checkpoint.steps == 3:
        pathlib.Path("running").touch()
    time.sleep(0 if began else 0.1)
    checkpoint.step()
print("finished", flush=True)
"""


class Desk:
    """A directory on the host where users log in."""

    def __init__(self, slurm, path: Path) -> None:
        self.slurm, self.path = slurm, path

    def paceline(self, *words: str):
        return self.slurm.run(*PACELINE, *words, cwd=self.path)

    def script(self, text: str) -> str:
        (self.path / "train.py").write_text(text)
        return "train.py"

    def wait(self, job: str, within_s: float = 60) -> str:
        """Wait for the end of a job; return its output."""
        deadline = time.monotonic() + within_s
        while self.slurm.run("squeue", "-hj", job, "-o", "%T").stdout.strip():
            assert time.monotonic() < deadline, self.output(job)
            time.sleep(0.1)
        return self.output(job)

    def output(self, job: str) -> str:
        path = self.path / "runs" / f"train-{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: str, words: str, within_s: float = 60) -> None:
        """Wait until a job has printed these words."""
        deadline = time.monotonic() + within_s
        while words not in self.output(job):
            assert time.monotonic() < deadline, self.output(job)
            time.sleep(0.05)

    def submit(self, *words: str) -> str:
        done = self.paceline("run", "--on", "slurm", *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("submitted Slurm job ")
        return done.stdout.split()[3].rstrip(";")


@pytest.fixture
def desk(slurm, tmp_path: Path) -> Desk:
    return Desk(slurm, tmp_path)


def expect_sums(text: str) -> None:
    lines = sorted(line.partition("] ")[2] for line in text.splitlines() if " sum " in line)
    assert lines == [
        "b rank 0 local 0 sum 10",
        "b rank 1 local 1 sum 10",
        "c rank 2 local 0 sum 10",
        "c rank 3 local 1 sum 10",
    ], text


def test_a_submitted_job_runs_on_all_nodes(desk):
    job = desk.submit("-N", "2", "-n", "4", "--time", "5:00", desk.script(SUM))
    expect_sums(desk.wait(job))
    assert (desk.path / "runs" / f"train-{job}.sbatch").read_text().startswith("#!/bin/bash\n")


def test_a_run_inside_an_allocation_uses_it(desk):
    command = [*PACELINE, "run", desk.script(SUM)]
    done = desk.slurm.run("salloc", "-N2", "-n4", "--ntasks-per-node=2", *command, cwd=desk.path)
    assert done.returncode == 0, done.stdout + done.stderr
    expect_sums(done.stdout)


def test_an_allocation_smaller_than_asked_is_refused(desk):
    command = [*PACELINE, "run", "-n", "5", desk.script(SUM)]
    done = desk.slurm.run("salloc", "-N2", "-n4", *command, cwd=desk.path)
    assert done.returncode == 2, done.stderr
    assert "4 slots" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--partition", "nosuch"), "invalid partition specified: nosuch"),
        (("--time", "sometime"), "Invalid --time specification"),
        (("--partition", "short", "--time", "5:00:00"), "Requested time limit is invalid"),
        (("-N", "9", "-n", "9"), "More processors requested than permitted"),
    ],
)
def test_slurms_own_words_when_it_refuses_a_job(desk, options, words):
    done = desk.paceline("run", "--on", "slurm", *options, desk.script(SUM))
    assert done.returncode == 1, done.stdout
    assert words in done.stderr and "Traceback" not in done.stderr


def test_dry_run_prints_a_valid_script_and_submits_nothing(desk):
    words = ["--on", "slurm", "-N", "2", "-n", "4", "-s", "1", "--dry-run", desk.script(SUM)]
    done = desk.paceline("run", *words, "--lr", "it's $(x)")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks=4 --ntasks-per-node=2\n" in done.stdout
    assert "paceline run -n 4 -s 1 --grace=45 train.py --lr " in done.stdout
    bash = shutil.which("bash") or "bash"
    assert subprocess.run([bash, "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert not (desk.path / "runs").exists()
    assert desk.slurm.run("squeue", "-h").stdout == ""


def test_elastic_training_continues_through_a_lost_node(desk):
    """The batch script and its steps have --no-kill: Slurm keeps the job without the node."""
    words = ["-N", "2", "-n", "4", "--on-loss", "shrink", "--min", "1", "--env", "STEPS=300"]
    job = desk.submit(*words, desk.script(TRAIN))
    desk.wait_for(job, "step 10")
    assert "b (2 slots): ranks 0-1" in desk.output(job)
    desk.slurm["c"].power_off()
    text = desk.wait(job, within_s=120)
    assert text.count("lost: host c is lost (") >= 2, text  # workers 2 and 3
    assert not re.search(r"worker \d \(host b, pid \d+\) lost", text), text
    done = [line for line in text.splitlines() if "] done" in line]
    assert {line.split("]")[0] for line in done} == {"[0", "[1"}, text
    assert "4 ranks, failed" not in text


def test_a_signal_to_the_step_of_one_node_is_a_notice_for_that_host(desk):
    """SIGURG: Slurm signals all processes of a step, and all but the agent ignore it."""
    words = ["-N", "2", "-n", "4", "--min", "1", "--preemption-deadline", "20s"]
    job = desk.submit(*words, "--env", "STEPS=300", desk.script(WITH_CHILD))
    desk.wait_for(job, "step 10")
    shown = desk.slurm.run("squeue", "--steps", "-hj", job, "-o", "%i %N %j").stdout
    [step] = [line.split()[0] for line in shown.splitlines() if line.endswith("c paceline-agent")]
    # scancel 22.05 reports an invalid job id for every signal to a step, and sends the signal.
    desk.slurm.run("scancel", "--signal=URG", step)
    desk.wait_for(job, "host c goes away in 20 s (its agent got SIGURG): ranks 2-3 hand over")
    text = desk.wait(job, within_s=120)
    assert "host c has left after" in text and "no step is repeated" in text, text
    assert not re.search(r"worker \d .* lost", text), text
    assert "child of rank 2 ended with 0" in text, text  # what a worker has started goes on, too
    done = {line.split("]")[0] for line in text.splitlines() if "] done" in line}
    assert done == {"[0", "[1"}, text


@pytest.mark.slow
def test_sigterm_becomes_a_checkpoint_and_a_requeue_that_resumes(desk):
    job = desk.submit("-N", "2", "-n", "2", desk.script(RESUMABLE))
    deadline = time.monotonic() + 60
    while not (desk.path / "running").exists():
        assert time.monotonic() < deadline, desk.output(job)
        time.sleep(0.05)
    # As Slurm does before the time limit (--signal=B:TERM@60).
    desk.slurm.run("scancel", "--batch", "--signal=TERM", job)
    text = desk.wait(job, within_s=120)
    begins = [int(line.rpartition(" ")[2]) for line in text.splitlines() if "begins at" in line]
    assert len(begins) == 4 and begins[:2] == [0, 0] and begins[2] == begins[3] >= 3, text
    assert text.count("] finished") == 2, text
