"""A router between test hosts, in a network namespace of its own without a way out.

Each host has a cable to the router. The router can drop what goes from one host to another, so
that a test can cut a host off, or one direction between two hosts.
"""

from __future__ import annotations

import itertools
import subprocess
import time

_ROUTER = (
    "ip link set lo up && echo 1 >/proc/sys/net/ipv4/ip_forward"
    " && echo 1 >/proc/sys/net/ipv6/conf/all/forwarding; echo ready; exec cat"
)


def inside(pid: int) -> list[str]:
    """Return the beginning of a command that runs in the network namespace of a process."""
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def run(command: list[str]) -> None:
    """Run a command that changes a network; raise with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Network:
    """Addresses of hosts by number, their cables, and the faults of the cables."""

    def __init__(self) -> None:
        self._router = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", _ROUTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._router.stdout is not None
        assert self._router.stdout.readline() == "ready\n", "cannot make a network namespace"
        self._cables: dict[int, int] = {}  # host to a process in its namespace
        self._muted: set[tuple[int, int]] = set()

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.{host}.2"

    @staticmethod
    def address6(host: int) -> str:
        return f"fd77:{host + 1:x}::2"

    def plug(self, host: int, pid: int) -> None:
        """Give a host, which has this process, a cable to the router."""
        self.unplug(host)
        port, router, there = f"port{host}", inside(self._router.pid), inside(pid)
        cable = ["ip", "link", "add", "eth0", "netns", str(pid), "type", "veth"]
        run([*cable, "peer", "name", port, "netns", str(self._router.pid)])
        for end, interface, number in ((there, "eth0", 2), (router, port, 1)):
            run([*end, "ip", "address", "add", f"10.77.{host}.{number}/24", "dev", interface])
            address = f"fd77:{host + 1:x}::{number}/64"
            run([*end, "ip", "address", "add", address, "dev", interface, "nodad"])
            run([*end, "ip", "link", "set", interface, "up"])
        self._add_routes(host, pid)
        self._cables[host] = pid

    def unplug(self, host: int) -> None:
        """Remove the cable of a host that has ended; it vanishes by itself, but later."""
        self._cables.pop(host, None)
        remove = ["ip", "link", "del", f"port{host}"]
        subprocess.run([*inside(self._router.pid), *remove], capture_output=True, check=False)

    def _add_routes(self, host: int, pid: int) -> None:
        there = inside(pid)
        run([*there, "ip", "route", "replace", "default", "via", f"10.77.{host}.1"])
        run([*there, "ip", "-6", "route", "replace", "default", "via", f"fd77:{host + 1:x}::1"])

    def wait_for_address6(self) -> None:
        """Wait until IPv6 works too: the kernel takes up to a second, IPv4 works at once."""
        show = [*inside(self._router.pid), "ip", "-o", "link"]
        while "NO-CARRIER" in subprocess.run(show, capture_output=True, text=True).stdout:
            time.sleep(0.02)

    def close(self) -> None:
        """Remove the router and with it every cable."""
        self._router.communicate()

    # -- faults ---------------------------------------------------------------------------------

    def set_link(self, host: int, state: str) -> None:
        """Set the cable of a host "up" or "down", as if it was pulled out of the router."""
        run([*inside(self._router.pid), "ip", "link", "set", f"port{host}", state])
        if state == "up":  # the kernel has forgotten the IPv6 address of an interface that was down
            address = f"fd77:{host + 1:x}::1/64"
            add = ["ip", "address", "replace", address, "dev", f"port{host}", "nodad"]
            run([*inside(self._router.pid), *add])

    def mute(self, host: int, towards: int) -> None:
        """Drop what a host sends to another; the other direction still works."""
        if (host, towards) not in self._muted:
            self._muted.add((host, towards))
            self._change_rules("add", host, towards)

    def unmute(self, host: int, towards: int) -> None:
        """Let pass again what a host sends to another."""
        if (host, towards) in self._muted:
            self._muted.discard((host, towards))
            self._change_rules("del", host, towards)

    def _change_rules(self, verb: str, host: int, towards: int) -> None:
        for version, address in (("-4", self.address), ("-6", self.address6)):
            way = ["from", address(host), "to", address(towards), "blackhole"]
            run([*inside(self._router.pid), "ip", version, "rule", verb, *way])

    def mend(self) -> None:
        """Undo every fault."""
        for host, towards in list(self._muted):
            self.unmute(host, towards)
        for host in self._cables:
            self.set_link(host, "up")

    def slow(self, host: int, rate: str) -> None:
        """Limit what a host sends and receives, for example to "1gbit"."""
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        ends = [(inside(self._cables[host]), "eth0"), (inside(self._router.pid), f"port{host}")]
        for (enter, interface), words in itertools.product(ends, [shape]):
            run([*enter, "tc", "qdisc", "replace", "dev", interface, *words])
