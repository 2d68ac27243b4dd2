"""Chooses the engine of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.launcher.engines.agent_command import AgentPlace
from paceline.launcher.engines.engine import Engine
from paceline.launcher.engines.ssh import SshEngine
from paceline.launcher.spec import RunSpec


def engine_for(spec: RunSpec, environ: Mapping[str, str], directory: Path) -> Engine:
    """Return the engine that starts agents on the hosts of a job.

    `directory` is private to the job and exists while the job runs.
    """
    place = AgentPlace(
        directory=os.getcwd(),
        python=spec.remote_python_in(environ),
        activation=spec.activate or "",
    )
    return SshEngine(spec.hosts, place, directory)
