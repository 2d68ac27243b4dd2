"""What the test hosts need from this machine, and which of it is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

import pytest

# A tool, and the Debian package that has it. Daemons are in directories that PATH may not have.
HOST_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
SSH_TOOLS = {**HOST_TOOLS, "sshd": "openssh-server", "ssh": "openssh-client"}
SLURM_TOOLS = {
    **HOST_TOOLS,
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
SEARCH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


def find_tool(name: str) -> str | None:
    """Return the path of a tool; None if this machine does not have it."""
    return shutil.which(name, path=SEARCH)


def why_not(tools: Mapping[str, str]) -> str:
    """Return the reason why these hosts cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "test hosts need root (network, process and mount namespaces)"
    packages = sorted({package for tool, package in tools.items() if find_tool(tool) is None})
    return f"test hosts need: apt-get install {' '.join(packages)}" if packages else ""


def require(tools: Mapping[str, str]) -> None:
    """Skip the test, with the reason, if these hosts cannot be made here."""
    if reason := why_not(tools):
        pytest.skip(reason)
