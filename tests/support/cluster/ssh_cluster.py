"""Test hosts with a real sshd each, and a person's `~/.ssh` on each of them.

with SshCluster("a", "b", "c") as cluster:
    cluster["a"].run(["ssh", "b", "hostname"])     # prints b
    cluster["c"].kill()                            # or power_off(), cut(), mend()
    cluster.network.mute(0, 1)                     # a's packets to b vanish

A process on any host reaches the others by name, with the key and the known host keys in its home
directory. Nothing outside of the hosts is reachable, and nothing outside reaches them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from support.cluster.host import Host
from support.cluster.network import Network
from support.cluster.requirements import SSH_TOOLS, find_tool, require

_SSHD = """
Port 22
HostKey {directory}/{name}.host_key
AuthorizedKeysFile {directory}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
StrictModes no
PidFile none
MaxStartups 100
LogLevel ERROR
"""


def make_key(path: Path) -> str:
    """Make a key pair without a password; return the public key."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
    subprocess.run(words, check=True)
    return path.with_name(f"{path.name}.pub").read_text().strip()


def make_directory() -> Path:
    """Make a directory for hosts; remove those of tests that were killed."""
    for old in Path(tempfile.gettempdir()).glob("plhosts-*-*"):
        if not Path("/proc", old.name.split("-")[1]).exists():
            shutil.rmtree(old, ignore_errors=True)
    # The name is short because those of sockets in it have at most 107 characters.
    return Path(tempfile.mkdtemp(prefix=f"plhosts-{os.getpid()}-"))


class SshCluster:
    """Hosts by name; the first is where a test usually starts the launcher."""

    def __init__(self, *names: str) -> None:
        require(SSH_TOOLS)
        self._names = names

    def __enter__(self) -> SshCluster:
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
            self._make_keys()
            for host in self._hosts.values():
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

    def _make_keys(self) -> None:
        mine = make_key(self.directory / "id")
        (self.directory / "authorized_keys").write_text(mine + "\n")
        known = []
        for host in self.hosts:
            key = make_key(self.directory / f"{host.name}.host_key")
            known.append(f"{host.name},{host.address},{host.address6} {key}\n")
            text = _SSHD.format(directory=self.directory, name=host.name)
            (self.directory / f"{host.name}.sshd_config").write_text(text)
        for host in self.hosts:
            own = host.home / ".ssh"
            (own / "known_hosts").write_text("".join(known))
            shutil.copy(self.directory / "id", own / "id_ed25519")
            (own / "id_ed25519").chmod(0o600)

    def boot(self, host: Host) -> None:
        """Start a host and its sshd, also after it was killed."""
        host.boot()
        host.run(["mkdir", "-p", "/run/sshd"])
        sshd = find_tool("sshd")
        assert sshd is not None
        config = self.directory / f"{host.name}.sshd_config"
        log = self.directory / f"{host.name}.sshd.log"
        host.start_daemon([sshd, "-f", str(config), "-D", "-e"], log)
        deadline = time.monotonic() + 10
        while "LISTEN" not in host.run(["ss", "-Hltn", "sport = :22"]).stdout:
            assert time.monotonic() < deadline, f"sshd on {host.name}: {log.read_text()}"
            time.sleep(0.02)

    def mend(self) -> None:
        """Undo every fault: start what was killed, and mend the network."""
        self.network.mend()
        for host in self.hosts:
            if not host.is_up:
                self.boot(host)

    def left(self) -> dict[str, list[str]]:
        """Return what runs on each host beside its daemons; hosts without anything are left out."""
        found = {host.name: host.processes() for host in self.hosts if host.is_up}
        return {
            name: [p.command for p in processes] for name, processes in found.items() if processes
        }

    def wait_until_idle(self, within_s: float = 10.0) -> None:
        """Wait until no host runs anything beside its daemons; raise with what is left."""
        for host in self.hosts:
            if host.is_up:
                host.wait_until_idle(within_s)
