"""Hosts on this machine with slow links: network namespaces at a switch, shaped with `tc`.

The namespaces have no names and no way out. Each lives as long as a process that holds it, which
ends with the pipe to this one: nothing remains, even after a kill -9. Root can make them, and so
can others where the kernel allows user namespaces; then the command runs once more inside of one.

`paceline run --hosts` reaches the hosts as any others. In place of ssh it finds a program of this
name on its PATH that enters the namespace of a host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from paceline.errors import UsageError
from paceline.planner.quantities import DEFAULT_LATENCY_S, Link
from paceline.runtime.config import inherited_environ

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_HOLD = "ip link set lo up && echo ready && exec cat"
_SSH = """#!/bin/sh
# Stands for ssh: enters the network namespace of a host on this machine.
while [ $# -gt 0 ] && [ "$1" != "--" ]; do [ "$1" = "-O" ] && exit 0; shift; done
host=$2; shift 2
case "$host" in
%s
*) echo "no such host: $host" >&2; exit 255;;
esac
exec nsenter --net="/proc/$pid/ns/net" sh -c "$*"
"""


_USER_NAMESPACE = ("unshare", "--user", "--map-root-user")


def find_rights() -> tuple[str, bool]:
    """Return why links cannot be shaped here ("" if they can), and whether that needs a user
    namespace."""
    missing = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    if missing:
        return (
            f"links are shaped with ip, tc, unshare and nsenter; install {', '.join(missing)}"
            f" (Debian: apt install {' '.join(missing)})"
        ), False
    can_make = ["unshare", "--net", "true"]
    if os.geteuid() == 0 and not _problem(can_make):
        return "", False
    why = _problem([*_USER_NAMESPACE, *can_make])
    if os.geteuid() != 0 and not why:
        return "", True
    return (
        f"this process may not shape links: user {os.geteuid()} cannot make a network namespace"
        f" ({why or _problem(can_make)}). Run it as root (in a container with --privileged), or"
        " allow user namespaces (sysctl kernel.unprivileged_userns_clone=1)"
    ), False


def find_delay_problem(user_namespace: bool) -> str:
    """Return why packets cannot be delayed here, "" if they can."""
    enter = _USER_NAMESPACE if user_namespace else ()
    delay = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    why = _problem([*enter, "unshare", "--net", *delay])
    if not why:
        return ""
    return f"this kernel cannot delay packets ({why}). It has no netem (modprobe sch_netem)"


def enter_user_namespace(is_needed: bool, arguments: Sequence[str]) -> None:
    """Run the command once more inside of a user namespace, if that is needed.

    `arguments` is the whole command line after "paceline".
    """
    if is_needed:
        command = [*_USER_NAMESPACE, sys.executable, "-m", "paceline", *arguments]
        os.execvp(command[0], command)


def _problem(command: Sequence[str]) -> str:
    """Return what a command printed if it failed; "" if it did not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""


class ShapedHosts:
    """Hosts 10.88.9.1, .2, ...; use it in a `with` statement."""

    def __init__(self, num_hosts: int, link: Link, directory: Path) -> None:
        self._link, self._directory = link, directory
        self.addresses = [f"10.88.9.{host + 1}" for host in range(num_hosts)]

    @property
    def options(self) -> list[str]:
        """Options of `paceline run`: the hosts, with room for one worker each."""
        return ["--hosts", ",".join(f"{address}:1" for address in self.addresses)]

    @property
    def text(self) -> str:
        """What the table and the page say about the links."""
        return "links are emulated by network namespaces"

    @property
    def environ(self) -> dict[str, str]:
        """Variables for `paceline run`: where it finds the program in place of ssh."""
        path = inherited_environ().get("PATH", os.defpath)
        return {"PATH": f"{self._directory}{os.pathsep}{path}"}

    def enter(self, host: int = 0) -> list[str]:
        """Return the beginning of a command that runs on one host."""
        return ["nsenter", f"--net=/proc/{self._pids[host]}/ns/net"]

    def __enter__(self) -> ShapedHosts:
        with contextlib.ExitStack() as undo:
            self._pids: list[str] = []
            for _ in range(len(self.addresses) + 1):  # the last one is the switch
                holder = _hold()
                undo.callback(holder.communicate)  # closes its stdin, which ends it
                self._pids.append(str(holder.pid))
            _run([*self.enter(-1), "ip", "link", "add", "switch", "type", "bridge"])
            _run([*self.enter(-1), "ip", "link", "set", "switch", "up"])
            for host in range(len(self.addresses)):
                self._plug_in(host)
            self._write_ssh()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _plug_in(self, host: int) -> None:
        port, switch, there = f"port{host}", self.enter(-1), self.enter(host)
        cable = ["ip", "link", "add", "cable", "netns", self._pids[host], "type", "veth"]
        _run([*cable, "peer", "name", port, "netns", self._pids[-1]])
        _run([*there, "ip", "addr", "add", f"{self.addresses[host]}/24", "dev", "cable"])
        _run([*there, "ip", "link", "set", "cable", "up"])
        _run([*switch, "ip", "link", "set", port, "master", "switch"])
        _run([*switch, "ip", "link", "set", port, "up"])
        for enter, interface in ((there, "cable"), (switch, port)):
            self._shape(enter, interface)

    def _shape(self, enter: Sequence[str], interface: str) -> None:
        """Limit what an interface sends; the latency is halved between the two ends."""
        bits = round(self._link.bytes_per_s * 8)
        # A burst of a millisecond, or small messages would never notice the rate.
        burst = max(16_000, round(self._link.bytes_per_s * 1e-3))
        tbf = ["tbf", "rate", f"{bits}bit", "burst", f"{burst}b", "latency", "50ms"]
        add = [*enter, "tc", "qdisc", "add", "dev", interface]
        if self._link.latency_s <= DEFAULT_LATENCY_S:
            _run([*add, "root", *tbf])
            return
        delay = ["netem", "delay", f"{round(self._link.latency_s / 2 * 1e6)}us", "limit", "100000"]
        _run([*add, "root", "handle", "1:", *delay])
        _run([*add, "parent", "1:", "handle", "2:", *tbf])

    def _write_ssh(self) -> None:
        cases = [
            f"{address}) pid={pid};;"
            for address, pid in zip(self.addresses, self._pids, strict=False)
        ]
        program = self._directory / "ssh"
        program.write_text(_SSH % "\n".join(cases), encoding="utf-8")
        program.chmod(0o755)


def _hold() -> subprocess.Popen[str]:
    """Make a network namespace; it lives until the returned process has lost its stdin."""
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", _HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != "ready\n":
        raise UsageError("--link: cannot make a network namespace, although a first one was made")
    return holder


def _run(command: Sequence[str]) -> None:
    """Run a command that changes a network; UsageError if it fails."""
    why = _problem(command)
    if why:
        raise UsageError(f"--link: `{' '.join(command)}` failed: {why}")
