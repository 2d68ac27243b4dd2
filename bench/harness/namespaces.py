"""Two network namespaces joined by a virtual cable, for measuring as if between two machines.

The namespaces have no names: each lives as long as a process that holds it, which in turn ends with
the pipe to this one. So nothing is left behind, even after a kill -9. Root only.
"""

from __future__ import annotations

import subprocess
from types import TracebackType

_HOLD = "ip link set lo up && echo ready && exec cat"


class Cable:
    """The two ends; use it in a `with` statement."""

    addresses = ("10.88.7.1", "10.88.7.2")
    interfaces = ("plbench0", "plbench1")

    def __enter__(self) -> Cable:
        self._holders = [_hold(), _hold()]
        self._pids = [str(holder.pid) for holder in self._holders]
        first, second = self.interfaces
        near = ["ip", "link", "add", first, "netns", self._pids[0], "type", "veth"]
        _run([*near, "peer", "name", second, "netns", self._pids[1]])
        for end, (interface, address) in enumerate(
            zip(self.interfaces, self.addresses, strict=True)
        ):
            _run([*self.enter(end), "ip", "addr", "add", f"{address}/24", "dev", interface])
            _run([*self.enter(end), "ip", "link", "set", interface, "up"])
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

    def shape(self, rate_mbit: int) -> None:
        """Let each direction carry no more than this; the frames' headers count."""
        for end, interface in enumerate(self.interfaces):
            limit = ["tbf", "rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "50ms"]
            _run([*self.enter(end), "tc", "qdisc", "replace", "dev", interface, "root", *limit])


def _hold() -> subprocess.Popen[str]:
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


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"network: {' '.join(command)}: {done.stderr.strip()}")
