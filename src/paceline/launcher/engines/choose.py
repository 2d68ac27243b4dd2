"""Chooses the engine of a job, and prepares its hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launcher.engines.agent_command import AgentPlace
from paceline.launcher.engines.engine import Engine
from paceline.launcher.engines.kubernetes.engine import KubernetesEngine
from paceline.launcher.engines.ray.engine import RayEngine
from paceline.launcher.engines.slurm import SlurmEngine
from paceline.launcher.engines.ssh import SshEngine
from paceline.launcher.engines.sync import sync_project
from paceline.launcher.hosts.host_check import Problem, report
from paceline.launcher.hosts.host_list import HostSlots
from paceline.launcher.spec import RunSpec
from paceline.runtime.formatting import data_size


@dataclass(frozen=True)
class EngineSettings:
    """What an engine may need. `directory` is private to the job and exists while it runs."""

    spec: RunSpec
    environ: Mapping[str, str]
    directory: Path
    place: AgentPlace
    job_id: str = ""


# By RunSpec.engine. A new engine is one file beside ssh.py, and one line here.
ENGINES: dict[str, Callable[[EngineSettings], Engine]] = {
    "ssh": lambda given: SshEngine(given.spec.hosts, given.place, given.directory),
    "kubernetes": lambda given: KubernetesEngine(given.spec.hosts, given.place, given.environ),
    "slurm": lambda given: SlurmEngine(given.spec.hosts, given.place, given.environ),
    "ray": lambda given: RayEngine(given.spec, given.place, given.environ, given.job_id),
}


def engine_for(
    spec: RunSpec, environ: Mapping[str, str], directory: Path, job_id: str = ""
) -> Engine:
    """Return the engine that starts agents on the hosts of a job."""
    place = AgentPlace(
        directory=os.getcwd(),
        python=spec.remote_python_in(environ),
        activation=spec.activate or "",
    )
    return ENGINES[spec.engine](EngineSettings(spec, environ, directory, place, job_id))


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
