"""Several network namespaces at a switch, as if hosts with a cable each. Root only.

The switch is a bridge in a namespace of its own, without a way out. Like the cable's ends
(namespaces.py) none of them has a name: they vanish with this process, whatever ends it.
"""

from __future__ import annotations

import contextlib
from types import TracebackType

from harness.namespaces import hold, one_millisecond_kb, run, shape


class Switch:
    """Hosts 10.88.8.1, .2, ...; use it in a `with` statement."""

    def __init__(self, num_hosts: int) -> None:
        self.addresses = [f"10.88.8.{host + 1}" for host in range(num_hosts)]

    def __enter__(self) -> Switch:
        with contextlib.ExitStack() as undo:
            self._pids = []
            for _ in range(len(self.addresses) + 1):  # the last one is the switch
                holder = hold()
                undo.callback(holder.communicate)  # closes its stdin, which ends it
                self._pids.append(str(holder.pid))
            run([*self._enter(-1), "ip", "link", "add", "switch", "type", "bridge"])
            run([*self._enter(-1), "ip", "link", "set", "switch", "up"])
            for host in range(len(self.addresses)):
                self._plug_in(host)
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
        port, switch = f"port{host}", self._enter(-1)
        cable = ["ip", "link", "add", "cable", "netns", self._pids[host], "type", "veth"]
        run([*cable, "peer", "name", port, "netns", self._pids[-1]])
        address = f"{self.addresses[host]}/24"
        run([*self.enter(host), "ip", "addr", "add", address, "dev", "cable"])
        run([*self.enter(host), "ip", "link", "set", "cable", "up"])
        run([*switch, "ip", "link", "set", port, "master", "switch"])
        run([*switch, "ip", "link", "set", port, "up"])

    def enter(self, host: int) -> list[str]:
        """Return the beginning of a command that runs on one host."""
        return self._enter(host)

    def _enter(self, index: int) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._pids[index]}/ns/net"]

    def shape(self, rate_mbit: int) -> None:
        """Let each cable carry no more than this, in each direction; headers count."""
        burst_kb = one_millisecond_kb(rate_mbit)
        for host in range(len(self.addresses)):
            ends = [(self._enter(host), "cable"), (self._enter(-1), f"port{host}")]
            for enter, interface in ends:
                shape(enter, interface, rate_mbit, burst_kb)
