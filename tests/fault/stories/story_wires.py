"""Hosts made of network namespaces around one router, which can lose packets on purpose.

with wires("here", "a", "b", "c") as net:
    net.cut("b")            # no more packets, no farewell
    net.mute("b", "a")      # packets from b to a vanish; those from a to b arrive
    net.slow("b", "10mbit")
    net.mend("b")

The host "here" is the test itself.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence

import pytest


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


class Wires:
    """A router in a namespace of its own, and a namespace for each host."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._tag = f"pl{os.getpid() % 100_000}"
        self._router = f"{self._tag}r"
        self._hosts = list(hosts)
        self._net = 128 + os.getpid() % 100  # several tests at once must not meet
        self._made: list[str] = []
        self._muted: set[tuple[str, str]] = set()

    def namespace(self, host: str) -> str:
        return f"{self._tag}{host}"

    def address(self, host: str, end: int = 2) -> str:
        return f"10.{self._net}.{self._hosts.index(host)}.{end}"

    def inside(self, host: str) -> list[str]:
        """Return the words in front of a command that run it on that host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def plug(self) -> None:
        self._add(self._router)
        forward = ["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"]
        subprocess.run(["ip", "netns", "exec", self._router, *forward], check=True)
        for host in self._hosts:
            if host == "here":
                self._plug_here()
                continue
            name = self.namespace(host)
            self._add(name)
            _ip("-n", name, "link", "set", "lo", "up")
            ends = ("link", "add", "wire", "type", "veth", "peer", "name", f"to-{host}")
            _ip("-n", name, *ends, "netns", self._router)
            near, far = f"{self.address(host)}/24", f"{self.address(host, 1)}/24"
            _ip("-n", name, "address", "add", near, "dev", "wire")
            _ip("-n", self._router, "address", "add", far, "dev", f"to-{host}")
            _ip("-n", name, "link", "set", "wire", "up")
            _ip("-n", self._router, "link", "set", f"to-{host}", "up")
            _ip("-n", name, "route", "add", "default", "via", self.address(host, 1))

    def _plug_here(self) -> None:
        far = ("peer", "name", "to-here", "netns", self._router)
        _ip("link", "add", self.namespace("here"), "type", "veth", *far)
        _ip("address", "add", f"{self.address('here')}/24", "dev", self.namespace("here"))
        _ip("link", "set", self.namespace("here"), "up")
        router = self.address("here", 1)
        _ip("-n", self._router, "address", "add", f"{router}/24", "dev", "to-here")
        _ip("-n", self._router, "link", "set", "to-here", "up")
        _ip("route", "add", f"10.{self._net}.0.0/16", "via", router)

    def _add(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)

    def unplug(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    # -- faults ---------------------------------------------------------------------------------

    def cut(self, host: str) -> None:
        """Let everything vanish that comes from a host or goes to it."""
        for other in self._others(host):
            self.mute(host, other)
            self.mute(other, host)

    def mend(self, host: str) -> None:
        """Let everything pass again."""
        for other in self._others(host):
            self.unmute(host, other)
            self.unmute(other, host)

    def mute(self, host: str, towards: str) -> None:
        """Let what a host sends to another one vanish; the other direction works."""
        if (host, towards) not in self._muted:
            self._muted.add((host, towards))
            _ip("-n", self._router, "rule", "add", *self._way(host, towards))

    def unmute(self, host: str, towards: str) -> None:
        if (host, towards) in self._muted:
            self._muted.discard((host, towards))
            _ip("-n", self._router, "rule", "del", *self._way(host, towards))

    def _way(self, host: str, towards: str) -> list[str]:
        return ["from", self.address(host), "to", self.address(towards), "blackhole"]

    def _others(self, host: str) -> list[str]:
        return [other for other in self._hosts if other != host]

    def slow(self, host: str, rate: str) -> None:
        """Limit what a host sends, for example to "10mbit"."""
        shape = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        words = ["tc", "qdisc", "replace", "dev", "wire", "root", *shape]
        subprocess.run([*self.inside(host), *words], check=True)


@contextlib.contextmanager
def wires(*hosts: str) -> Iterator[Wires]:
    """Make hosts around one router; they are gone when the block ends."""
    if os.geteuid() != 0:
        pytest.skip("needs root for network namespaces")
    net = Wires(hosts)
    try:
        net.plug()
        yield net
    finally:
        net.unplug()
