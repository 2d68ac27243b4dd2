"""Test hosts with a real sshd each, and a person's `~/.ssh` on each of them.

with SshCluster("a", "b", "c") as cluster:
    cluster["a"].run(["ssh", "b", "hostname"])     # prints b
    cluster["c"].kill()                            # or power_off(), cut(), mend()
    cluster.network.mute(0, 1)                     # a's packets to b vanish

A process on any host reaches the others by name, with the key and the known host keys in its home
directory. Nothing outside of the hosts is reachable, and nothing outside reaches them.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from support.cluster.host import Host
from support.cluster.host_group import HostGroup
from support.cluster.requirements import SSH_TOOLS, find_tool

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


class SshCluster(HostGroup):
    """Hosts by name; the first is where a test usually starts the launcher."""

    tools = SSH_TOOLS

    def _prepare(self) -> None:
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
        super().boot(host)
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
