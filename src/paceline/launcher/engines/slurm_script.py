"""The batch script of `paceline run --on slurm`, and its submission.

The script runs `paceline run` with the user's other options on the first node, where it finds the
allocation (slurm_allocation.py). Slurm warns the script before the time limit; workers then save,
and the script puts the job back into the queue, where it resumes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import __version__
from paceline.errors import ConfigError, LaunchError
from paceline.launcher.hosts.host_list import HostSlots
from paceline.runtime.preemption import PREEMPTED

WARNING_S = 60  # from Slurm's SIGTERM to the time limit
GRACE_S = 45  # of those, for workers to finish their step and save
_DIRECTORY = "runs"
# Options that would contradict the script, or that it does not support.
_REFUSED = {
    "--array": "submit one job for each task",
    "-a": "submit one job for each task",
    "--ntasks": "use -n",
    "-n": "use -n of paceline run",
    "--nodes": "use -N",
    "-N": "use -N of paceline run",
    "--wrap": "name the script as for any other job",
}

_TEXT = """\
#!/bin/bash
# Written by Paceline {version}: paceline run --on slurm
{settings}
# The loss of a node is the loss of its workers, not the end of the job.
#SBATCH --no-kill
# SIGTERM comes to this script {warning_s} s before the time limit; workers then save a checkpoint.
#SBATCH --signal=B:TERM@{warning_s}
#SBATCH --requeue
#SBATCH --open-mode=append

cd {directory} || exit 1
{activation}{command} &
job=$!
trap 'kill -TERM "$job"' TERM
wait "$job"; code=$?
while kill -0 "$job" 2>/dev/null; do wait "$job"; code=$?; done
trap - TERM

# Exit code {preempted}: the workers have saved before their end. The job resumes when Slurm runs
# it again.
if [ "$code" -eq {preempted} ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60  # until Slurm ends this script
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """What is asked of Slurm for one job; `options` are further options of sbatch."""

    name: str
    num_nodes: int
    num_workers: int
    time: str | None = None
    partition: str | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= self.num_workers:
            raise ConfigError(
                f"-N {self.num_nodes} with {self.num_workers} workers: expected from 1 node to one"
                " for each worker; change -N or -n"
            )
        for option, value in (("--time", self.time), ("--partition", self.partition)):
            if value is not None and not re.fullmatch(r"[A-Za-z0-9_.,:+-]+", value):
                raise ConfigError(f"{option} {value[:60]!r}: expected letters, digits and .,:_-+")
        for text in self.options:
            name = text.partition("=")[0].strip()
            if not name.startswith("-") or not text.isprintable():
                raise ConfigError(
                    f"--sbatch {text[:60]!r}: expected one option of sbatch, for example"
                    " --sbatch=--account=physics"
                )
            if name in _REFUSED:
                raise ConfigError(f"--sbatch={text[:60]}: not supported here; {_REFUSED[name]}")

    @property
    def workers_per_node(self) -> int:
        return -(-self.num_workers // self.num_nodes)

    def placeholders(self) -> tuple[HostSlots, ...]:
        """Return nodes as the allocation will have them, to check the job before it waits."""
        names = (f"node-{number + 1}" for number in range(self.num_nodes))
        return tuple(HostSlots(name, self.workers_per_node) for name in names)

    def settings(self) -> list[str]:
        """Return the values of the #SBATCH lines that differ between jobs."""
        lines = [
            f"--job-name={re.sub(r'[^A-Za-z0-9_.-]', '_', self.name)[:60] or 'paceline'}",
            f"--nodes={self.num_nodes}",
            f"--ntasks={self.num_workers} --ntasks-per-node={self.workers_per_node}",
            f"--output={_DIRECTORY}/%x-%j.log",
        ]
        lines += [] if self.time is None else [f"--time={self.time}"]
        lines += [] if self.partition is None else [f"--partition={self.partition}"]
        return [*lines, *(option.strip() for option in self.options)]


def batch_script(
    request: SlurmRequest, python: str, arguments: Sequence[str], activation: str | None = None
) -> str:
    """Return the batch script; `arguments` are those of `paceline run` inside of the job."""
    return _TEXT.format(
        version=__version__,
        settings="\n".join(f"#SBATCH {line}" for line in request.settings()),
        warning_s=WARNING_S,
        directory=shlex.quote(os.getcwd()),
        activation="" if activation is None else f"{activation}\n",
        command=shlex.join([python, "-m", "paceline", "run", *arguments]),
        preempted=PREEMPTED,
    )


def submit(text: str, name: str) -> str:
    """Submit a batch script and keep a copy beside its output; return what to print.

    Raises LaunchError with sbatch's own words.
    """
    directory = Path(_DIRECTORY)
    try:
        directory.mkdir(exist_ok=True)
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise LaunchError(
            f"cannot submit the job: {error}; run this on a host of the Slurm cluster, in a"
            " directory that you can write to"
        ) from error
    if done.returncode != 0:
        raise LaunchError(f"Slurm does not accept the job: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    kept = directory / f"{name}-{job}.sbatch"
    kept.write_text(text, encoding="utf-8")
    return (
        f"submitted Slurm job {job}; its output will be in {directory}/{name}-{job}.log, the batch"
        f" script is {kept}; `squeue -j {job}` shows its state, `scancel {job}` ends it"
    )
