"""Connects the driver to a Ray cluster, or says in one sentence what is wrong and what to do."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

from paceline.errors import LaunchError

CONNECT_S = 5.0  # for the head to accept a connection
INIT_S = 20.0  # for Ray to answer; longer means that this machine is no node of the cluster
# What Ray prints for a wrong token, again and again, before it gives up.
WRONG_TOKEN = "InvalidAuthToken"


def import_ray() -> Any:
    """Return the module of Ray; raises LaunchError if this interpreter does not have it."""
    try:
        import ray
    except ImportError as error:
        raise LaunchError(
            f"--on ray: {sys.executable} cannot import Ray ({error}); install it there, in the"
            " version of the cluster: pip install 'ray[default]'"
        ) from None
    return ray


def connect(ray: Any, address: str, job_id: str, environ: Mapping[str, str]) -> None:
    """Connect to the cluster at an address, or to the one of this machine; raises LaunchError."""
    address = address or environ.get("RAY_ADDRESS", "")
    if "://" in address:
        raise LaunchError(
            f"RAY_ADDRESS={address[:80]}: expected the address of the cluster's head, such as"
            " 10.0.0.1:6379; Ray Client and the dashboard's address cannot be used. From a machine"
            " that is no node of the cluster, use `ray job submit -- paceline run --on ray ...`"
        )
    if address and address != "auto":
        _try_connection(address)
    try:
        ray.init(
            address=address or "auto",
            namespace=f"paceline-{job_id}",
            log_to_driver=False,
            logging_level="ERROR",
        )
    except Exception as error:
        raise LaunchError(explain(ray, address, error)) from error


def explain(ray: Any, address: str, error: Exception) -> str:
    """Return one sentence about why Ray refused the connection."""
    text = str(error).strip()
    if type(error).__name__ == "AuthenticationError" or WRONG_TOKEN in text:
        return no_token(address)
    if "ersion mismatch" in text:
        found = re.search(r"started with:?\s*Ray: (\S+)\s*Python: (\S+)", text)
        theirs = f"Ray {found[1]} and Python {found[2]}" if found else "another version"
        python = ".".join(map(str, sys.version_info[:3]))
        return (
            f"the Ray cluster runs {theirs}, this environment has Ray {ray.__version__} and Python"
            f" {python}; install the cluster's version here (pip install 'ray[default]==VERSION')"
        )
    if "Could not find any running Ray instance" in text:
        return (
            "no Ray cluster runs on this machine; start one (`ray start --head`), name its head"
            " with --on ray://HOST:PORT or RAY_ADDRESS, or use `ray job submit`"
        )
    where = f" at {address}" if address else ""
    last = text.splitlines()[0] if text else type(error).__name__
    return f"cannot connect to the Ray cluster{where}: {last}; try `ray status` here"


def no_token(address: str) -> str:
    """Return what to do about a missing or a wrong token."""
    where = f" at {address}" if address else ""
    return (
        f"the Ray cluster{where} refuses this process: its token is missing or wrong; set"
        " RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or ~/.ray/auth_token) to the cluster's"
    )


def no_answer(address: str) -> str:
    """Return what is likely if Ray neither connects nor fails."""
    return (
        f"Ray{f' at {address}' if address else ''} has not answered in {INIT_S:g} s; this machine"
        " must be a node of that cluster (`ray start --address=...`), else use `ray job submit`"
    )


def _try_connection(address: str) -> None:
    """Fail soon and clearly where Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise LaunchError(f"RAY_ADDRESS={address[:80]}: expected HOST:PORT, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise LaunchError(
            f"nothing answers at {address}, the address of the Ray cluster"
            f" ({error.strerror or error}); check it with `ray status --address {address}`"
        ) from None
