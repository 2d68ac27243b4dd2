"""Two network namespaces joined by a virtual cable, for measuring as if between two machines.

The namespaces have no names: each lives as long as a process that holds it, which in turn ends with
the pipe to this one. So nothing remains, even after a kill -9. Root only.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from harness.ranks import Process

_HOLD = "ip link set lo up && echo ready && exec cat"


class Cable:
    """The two ends; use it in a `with` statement."""

    addresses = ("10.88.7.1", "10.88.7.2")
    interfaces = ("plbench0", "plbench1")

    def __enter__(self) -> Cable:
        self._holders = [hold(), hold()]
        self._pids = [str(holder.pid) for holder in self._holders]
        first, second = self.interfaces
        near = ["ip", "link", "add", first, "netns", self._pids[0], "type", "veth"]
        run([*near, "peer", "name", second, "netns", self._pids[1]])
        for end, (interface, address) in enumerate(
            zip(self.interfaces, self.addresses, strict=True)
        ):
            run([*self.enter(end), "ip", "addr", "add", f"{address}/24", "dev", interface])
            run([*self.enter(end), "ip", "link", "set", interface, "up"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for holder in self._holders:
            holder.communicate()  # closes its stdin: cat ends, and the namespace with it

    def enter(self, end: int) -> list[str]:
        """Return the beginning of a command that runs at one end."""
        return ["nsenter", f"--net=/proc/{self._pids[end]}/ns/net"]

    def ranks(
        self,
        name: str,
        scratch: Path,
        port: int = 18600,
        *,
        per_host: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> list[Process]:
        """Return how to start so many ranks of the job `name` at each end."""
        secret = scratch / f"{name}.secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32), encoding="ascii")
        shared = {
            "WORLD_SIZE": str(2 * per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "BENCH_STORE": str(scratch / f"{name}.store"),
            "BENCH_TCP_HOST": self.addresses[0],
            "PACELINE_JOB": f"bench-{secrets.token_hex(6)}",
            "PACELINE_COORDINATOR": f"{self.addresses[0]}:{port}",
            "PACELINE_SECRET_FILE": str(secret),
            **(env or {}),
        }
        return [
            Process(
                [*self.enter(end), sys.executable],
                {
                    **shared,
                    "RANK": str(end * per_host + local_rank),
                    "LOCAL_RANK": str(local_rank),
                    "GLOO_SOCKET_IFNAME": self.interfaces[end],
                    "PACELINE_BIND": self.addresses[end],
                },
            )
            for end in range(2)
            for local_rank in range(per_host)
        ]

    def shape(self, rate_mbit: int, burst_kb: int = 256) -> None:
        """Let each direction carry no more than this; the frames' headers count."""
        for end, interface in enumerate(self.interfaces):
            shape(self.enter(end), interface, rate_mbit, burst_kb)


def hold() -> subprocess.Popen[str]:
    """Make a network namespace; it lives until the returned process has lost its stdin."""
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", _HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != "ready\n":
        raise SystemExit("network: cannot make a network namespace (is this root?)")
    return holder


def can_shape() -> str:
    """Return why there can be no shaped links here; "" if there can."""
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"these tools are missing: {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "only root can make network namespaces"


def shape(enter: list[str], interface: str, rate_mbit: int, burst_kb: int) -> None:
    """Let an interface send no more than this, once it has sent the burst at full speed."""
    limit = ["tbf", "rate", f"{rate_mbit}mbit", "burst", f"{burst_kb}kb", "latency", "50ms"]
    run([*enter, "tc", "qdisc", "replace", "dev", interface, "root", *limit])


def one_millisecond_kb(rate_mbit: int) -> int:
    """Return the burst for what sends little: all of it would fit into the usual one."""
    return max(16, rate_mbit // 8)


def run(command: list[str]) -> None:
    """Run one of the commands that change a network, or say why it would not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"network: {' '.join(command)}: {done.stderr.strip()}")
