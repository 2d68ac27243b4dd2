"""Chooses the engine of a job, and prepares its hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launcher.engines.agent_command import AgentPlace
from paceline.launcher.engines.engine import Engine
from paceline.launcher.engines.slurm import SlurmEngine
from paceline.launcher.engines.ssh import SshEngine
from paceline.launcher.engines.sync import sync_project
from paceline.launcher.hosts.host_check import Problem, report
from paceline.launcher.hosts.host_list import HostSlots
from paceline.launcher.spec import RunSpec
from paceline.runtime.formatting import data_size


def engine_for(spec: RunSpec, environ: Mapping[str, str], directory: Path) -> Engine:
    """Return the engine that starts agents on the hosts of a job.

    `directory` is private to the job and exists while the job runs.
    """
    place = AgentPlace(
        directory=os.getcwd(),
        python=spec.remote_python_in(environ),
        activation=spec.activate or "",
    )
    if spec.engine == "slurm":
        return SlurmEngine(spec.hosts, place, environ)
    return SshEngine(spec.hosts, place, directory)


async def prepare_hosts(
    engine: Engine, spec: RunSpec, hosts: Sequence[HostSlots], log: Callable[[str], None]
) -> None:
    """Copy the project onto other hosts if --sync was given; raises LaunchError."""
    if not spec.sync or not isinstance(engine, SshEngine):
        return
    done = await sync_project(engine, Path.cwd(), hosts)
    if done.problems:
        raise LaunchError(report([Problem(*one) for one in done.problems.items()]))
    log(
        f"copied {done.num_files} files ({data_size(done.num_bytes)}) to"
        f" {', '.join(done.directories)} in {done.after_s:.1f} s"
    )
