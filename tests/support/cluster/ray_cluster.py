"""Test hosts as a real Ray cluster: the first has the head, the others are its nodes.

with RayCluster("a", "b", "c") as cluster:
    cluster.run("a", "python", "train.py")

Ray has an environment of its own, because it is large and no part of the default one: `.venv-ray`
(`make .venv-ray/bin/ray` makes it) or that of the variable PACELINE_RAY_ENV. It sees the packages
of .venv, so Paceline is the same there. The hosts have no way out: Ray listens on all addresses.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster.host import Host
from support.cluster.host_group import HostGroup
from support.cluster.requirements import SEARCH

ROOT = Path(__file__).parents[3]
PORT = 6399
SESSIONS = "/run/ray"  # on each host, with Ray's logs
_NODE_CPUS = 4  # a claim: nodes share the cores of this machine
# Waits until nobody has anything of the cluster, or so many CPUs are free.
_FREE = """
import ray, sys, time
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
deadline = time.monotonic() + 15
while time.monotonic() < deadline:
    groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    free, cpus = ray.available_resources().get("CPU", 0), float(sys.argv[1])
    if free == cpus or cpus < 0 and not groups and free == ray.cluster_resources()["CPU"]:
        print("free")
        break
    time.sleep(0.1)
else:
    print(groups, ray.available_resources())
"""
_FILL = """
import ray, sys, time
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
here = {"CPU": float(sys.argv[2]), f"node:{sys.argv[1]}": 0.01}
assert ray.util.placement_group([here]).wait(20)
print("filled", flush=True)
time.sleep(1000)
"""
# Changes the version that the head announces; prints the one before.
_CLAIM = """
import json, sys
from ray._raylet import GcsClient
import ray._private.ray_constants, os
client = GcsClient(address=os.environ["RAY_ADDRESS"])
facts = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", b"cluster"))
print(facts["ray_version"])
facts["ray_version"] = sys.argv[1]
client.internal_kv_put(b"CLUSTER_METADATA", json.dumps(facts).encode(), True, b"cluster")
"""


def ray_environment() -> Path:
    """Return the environment that has Ray; skip the test if there is none."""
    path = Path(os.environ.get("PACELINE_RAY_ENV", ROOT / ".venv-ray"))
    if not (path / "bin" / "ray").exists():
        pytest.skip(
            "Ray is not installed: `make .venv-ray/bin/ray`, or name an environment that has it in"
            " PACELINE_RAY_ENV"
        )
    return path


class RayCluster(HostGroup):
    """A head and its nodes; `boot` starts a host as a node, also a new or a killed one."""

    def __init__(self, *names: str, spare: tuple[str, ...] = (), cpus: int = _NODE_CPUS) -> None:
        self.env_directory = ray_environment()
        self._spare, self._cpus = spare, cpus  # `spare` are hosts that are no nodes yet
        super().__init__(*names, *spare)

    @property
    def python(self) -> str:
        return str(self.env_directory / "bin" / "python")

    @property
    def address(self) -> str:
        return f"{self.hosts[0].address}:{PORT}"

    @property
    def nodes(self) -> list[str]:
        """Return the names of the hosts that are nodes now."""
        return [host.name for host in self.hosts if host.is_up and host.name not in self._spare]

    @property
    def environ(self) -> dict[str, str]:
        """Return what a process needs to reach the cluster."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.directory / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Else Ray waits a minute for a head, and as long for a node that does not answer.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "12",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
            "RAY_ADDRESS": self.address,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.env_directory / 'bin'}:{SEARCH}",
        }

    def _prepare(self) -> None:
        super()._prepare()
        token = self.directory / "token"
        token.write_text(os.urandom(32).hex())
        token.chmod(0o600)

    def boot(self, host: Host) -> None:
        """Start a host, and unless it is a spare one, its daemons of Ray."""
        super().boot(host)
        if host.name not in self._spare:
            self.add_node(host)

    def add_node(self, host: Host) -> None:
        """Make a host that runs a node of the cluster."""
        self._spare = tuple(name for name in self._spare if name != host.name)
        is_head = host is self.hosts[0]
        role = ["--head", f"--port={PORT}"] if is_head else [f"--address={self.address}"]
        log = self.directory / f"{host.name}.ray.log"
        command = [
            *(str(self.env_directory / "bin" / "ray"), "start", "--block", *role),
            *(f"--node-ip-address={host.address}", f"--num-cpus={self._cpus}"),
            *("--object-store-memory=80000000", "--disable-usage-stats"),
            # Hosts have the same files but for /run, and Ray expects files of its own on each.
            *([f"--temp-dir={SESSIONS}"] if is_head else []),
            *(["--include-dashboard=true", "--dashboard-host=127.0.0.1"] if is_head else []),
        ]
        host.start_daemon(command, log, **self.environ)
        self.wait(lambda: "Ray runtime started" in log.read_text(), log)

    def wait(self, is_ready: Any, log: Path, within_s: float = 90) -> None:
        deadline = time.monotonic() + within_s
        while not is_ready():
            assert time.monotonic() < deadline, f"Ray does not start: {log.read_text()[-2000:]}"
            time.sleep(0.1)

    def wait_until_free(self, within_s: float = 20) -> None:
        """Wait until no process of a job runs, and no placement group or actor is left."""
        deadline = time.monotonic() + within_s
        while left := {
            h.name: h.job_processes() for h in self.hosts if h.is_up and h.job_processes()
        }:
            assert time.monotonic() < deadline, f"left: {left}"
            time.sleep(0.1)
        self.wait_until_room(-1)

    def wait_until_room(self, cpus: int) -> None:
        """Wait until Ray has so many CPUs free; -1: all, and no placement group is left."""
        on = next(host.name for host in self.hosts if host.is_up)
        done = self.run(on, self.python, "-c", _FREE, str(cpus))
        assert done.returncode == 0 and "free" in done.stdout, done.stdout + done.stderr

    def fill(self, host: Host) -> None:
        """Take all room on a host, until it ends."""
        command = [self.python, "-c", _FILL, host.address, str(self._cpus)]
        log = self.directory / f"{host.name}.fill.log"
        host.start_daemon(command, log, **self.environ)
        self.wait(lambda: "filled" in log.read_text(), log)

    @contextlib.contextmanager
    def claimed_version(self, version: str) -> Iterator[None]:
        """Let the cluster say that it has this version of Ray."""
        found = self.run("a", self.python, "-c", _CLAIM, version)
        assert found.returncode == 0, found.stderr
        try:
            yield
        finally:
            self.run("a", self.python, "-c", _CLAIM, found.stdout.split()[-1])

    def run(self, on: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a host with the environment for Ray."""
        env = {**self.environ, **options.pop("env", {})}
        return self[on].run(list(command), env=env, **options)
