"""Hosts with a network between them; ssh_cluster.py and slurm_cluster.py add their daemons."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from support.cluster.host import Host
from support.cluster.network import Network
from support.cluster.requirements import HOST_TOOLS, require

Group = TypeVar("Group", bound="HostGroup")


def make_directory() -> Path:
    """Make a directory for hosts; remove those of tests that were killed."""
    for old in Path(tempfile.gettempdir()).glob("plhosts-*-*"):
        if not Path("/proc", old.name.split("-")[1]).exists():
            shutil.rmtree(old, ignore_errors=True)
    # The name is short because those of sockets in it have at most 107 characters.
    return Path(tempfile.mkdtemp(prefix=f"plhosts-{os.getpid()}-"))


class HostGroup:
    """Hosts by name; use it in a `with` statement."""

    tools: Mapping[str, str] = HOST_TOOLS

    def __init__(self, *names: str) -> None:
        require(self.tools)
        self._names = names

    def __enter__(self: Group) -> Group:
        with contextlib.ExitStack() as undo:
            self.directory = make_directory()
            undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self.network = Network()
            undo.callback(self.network.close)
            addresses = {name: Network.address(i) for i, name in enumerate(self._names)}
            self._hosts = {
                name: Host(name, i, self.network, self.directory, addresses)
                for i, name in enumerate(self._names)
            }
            self._prepare()
            for host in self.hosts:
                undo.callback(host.kill)
                self.boot(host)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    @property
    def hosts(self) -> list[Host]:
        return list(self._hosts.values())

    def _prepare(self) -> None:
        """Write the files that daemons need; the hosts have not started."""

    def boot(self, host: Host) -> None:
        """Start a host and its daemons, also after it was killed."""
        host.boot()

    def mend(self) -> None:
        """Undo every fault: mend the network, and start what was killed."""
        self.network.mend()
        for host in self.hosts:
            if not host.is_up:
                self.boot(host)

    def left(self) -> dict[str, list[str]]:
        """Return what runs on each host beside its daemons; hosts without anything are left out."""
        found = {host.name: host.processes() for host in self.hosts if host.is_up}
        return {name: [p.command for p in those] for name, those in found.items() if those}

    def wait_until_idle(self, within_s: float = 10.0) -> None:
        """Wait until no host runs anything beside its daemons; raise with what is left."""
        for host in self.hosts:
            if host.is_up:
                host.wait_until_idle(within_s)
