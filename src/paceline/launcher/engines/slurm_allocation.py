"""The allocation of Slurm in which `paceline run` was started: its hosts and their slots.

In a batch script, and in the shell of salloc, Slurm has given the job some nodes and started one
process. `paceline run` there uses all of them. In a step of srun, Slurm has already started one
process for each task, so `paceline run` is an ordinary command of one host.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from paceline.errors import ConfigError, LaunchError
from paceline.launcher.hosts.host_list import HostSlots

# Slurm's number of the step in which salloc runs a shell (LaunchParameters=use_interactive_step).
_INTERACTIVE_STEP = "4294967290"
_RUN = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")
_PATIENCE_S = 30


def slurm_hosts(environ: Mapping[str, str]) -> tuple[HostSlots, ...]:
    """Return the nodes of the allocation around this process; () if it needs none of them.

    That is so outside of Slurm, in a step of srun, and if the only node is this host. Raises
    ConfigError for job arrays and heterogeneous jobs, LaunchError if Slurm does not answer.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not (environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")):
        return ()  # a number that some script has kept is no allocation
    if not job or environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP) != _INTERACTIVE_STEP:
        return ()
    names = _node_names(environ)
    if names == [environ.get("SLURMD_NODENAME")]:
        return ()
    _refuse_unsupported(environ, job)
    slots = _slots(environ, len(names))
    return tuple(HostSlots(name, count) for name, count in zip(names, slots, strict=True))


def expand_runs(text: str, variable: str) -> list[int]:
    """Return Slurm's "4(x2),1" as [4, 4, 1]."""
    counts: list[int] = []
    for word in text.split(","):
        match = _RUN.fullmatch(word)
        if match is None:
            raise ConfigError(f"{variable}={text[:80]!r}: expected a form like '4(x2),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _refuse_unsupported(environ: Mapping[str, str], job: str) -> None:
    if environ.get("SLURM_ARRAY_TASK_ID"):
        raise ConfigError(
            f"Slurm job {job} is task {environ['SLURM_ARRAY_TASK_ID']} of a job array; paceline run"
            " uses several nodes only in a job of its own: submit one job for each task, or give"
            " each task one node"
        )
    if environ.get("SLURM_HET_SIZE"):
        raise ConfigError(
            f"Slurm job {job} is heterogeneous ({environ['SLURM_HET_SIZE']} components), which"
            " paceline run does not support; submit it as one component"
        )


def _node_names(environ: Mapping[str, str]) -> list[str]:
    nodes = environ.get("SLURM_JOB_NODELIST") or environ["SLURM_NODELIST"]
    if re.fullmatch(r"[A-Za-z0-9_.,-]+", nodes):  # nothing to expand
        return nodes.split(",")
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"`{' '.join(command)}` failed: {error}; is Slurm in PATH?") from error
    if done.returncode != 0 or not done.stdout.split():
        raise LaunchError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout.split()


def _slots(environ: Mapping[str, str], num_nodes: int) -> list[int]:
    """Return a slot for each task if their number was asked for, else for each CPU."""
    variable = "SLURM_TASKS_PER_NODE" if environ.get("SLURM_NTASKS") else "SLURM_JOB_CPUS_PER_NODE"
    text = environ.get(variable, "")
    counts = expand_runs(text, variable) if text else [1] * num_nodes
    if len(counts) != num_nodes:
        raise ConfigError(f"{variable}={text[:80]!r} does not fit the {num_nodes} nodes of the job")
    if variable == "SLURM_JOB_CPUS_PER_NODE":
        per_task = environ.get("SLURM_CPUS_PER_TASK", "1")
        return [max(1, count // max(1, int(per_task))) for count in counts]
    return counts
