"""Which variables travel to another host.

PATH, HOME, LD_LIBRARY_PATH and most others describe the machine on which they were set. A process
on another host therefore has the environment of its agent, and over it only what the launcher
sends: --env, the PACELINE_* settings and OMP_NUM_THREADS of the launcher, and the variables of the
job (ranks, addresses). A user who wants another variable on every host names it with --env.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.launcher.environment import (
    HostSettings,
    JobAddresses,
    process_environ,
    without_foreign_ranks,
)
from paceline.launcher.spec import RESERVED, RunSpec
from paceline.runtime.process_names import ProcessName

_SETTINGS = "PACELINE_"
# Settings of one host, and of the launcher itself.
_STAY = {"PACELINE_BIND", "PACELINE_HOST_ID", "PACELINE_LOG_DIR"}


def travelling_settings(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the launcher that other hosts get, too."""
    return {
        name: value
        for name, value in base.items()
        if name == "OMP_NUM_THREADS"
        or (name.startswith(_SETTINGS) and name not in RESERVED and name not in _STAY)
    }


def sent_environ(
    base: Mapping[str, str],
    spec: RunSpec,
    name: ProcessName,
    where: JobAddresses,
    host: HostSettings,
) -> dict[str, str]:
    """Return the variables that the launcher sends to an agent for one process.

    `base` is the launcher's environment, `where.secret_file` a file on the host of the process.
    """
    return process_environ(
        travelling_settings(base), spec, name, where, cores=host.cores, host=host
    )


def environ_on_host(own: Mapping[str, str], sent: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process: the agent's own, and over it what was sent.

    PACELINE_* settings of the agent's own environment do not count: all processes of a job have the
    same, those of the launcher.
    """
    kept = {
        name: value
        for name, value in without_foreign_ranks(own).items()
        if not name.startswith(_SETTINGS)
    }
    return {**kept, **sent}
