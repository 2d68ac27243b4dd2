"""The ssh engine: hosts from --hosts or a host file, agents through the system's `ssh`.

The user's own settings apply: ~/.ssh/config, ssh-agent, jump hosts. Options given here win over
them: no prompt, no terminal, no forwarding, and a dead host is noticed. All connections of a job to
a host share one (ControlMaster), through a socket in the job's private directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.launcher.engines.agent_command import AGENT_COMMAND_TEXT, AgentPlace
from paceline.launcher.engines.engine import start_child
from paceline.launcher.engines.ssh_failures import SSH_FAILED, explain_ssh
from paceline.launcher.hosts.host_list import HostSlots

CONNECT_S = 10
# A host that answers nothing for the product of both, in seconds, is given up.
_ALIVE_S, _ALIVE_COUNT = 5, 3
# How long a shared connection waits for its next use. Short: it outlives a launcher that is killed.
_KEEP_S = 2
# The name of a socket has at most 107 bytes; ssh adds 17 while it makes one.
_MAX_SOCKET_BYTES = 107 - 17
REMEDY = "install OpenSSH's client (Debian: apt install openssh-client)"

_OPTIONS = {
    "BatchMode": "yes",  # no questions: they end as errors
    "ConnectTimeout": str(CONNECT_S),
    "ServerAliveInterval": str(_ALIVE_S),
    "ServerAliveCountMax": str(_ALIVE_COUNT),
    "LogLevel": "ERROR",  # no banners
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "StdinNull": "no",
    "ForkAfterAuthentication": "no",
    "EscapeChar": "none",
}


class SshEngine:
    """Starts agents by ssh; `directory` is private to the job and exists while the job runs."""

    name = "ssh"

    def __init__(self, hosts: Sequence[HostSlots], place: AgentPlace, directory: Path) -> None:
        self._hosts, self._place, self._directory = list(hosts), place, directory
        self._places: dict[str, AgentPlace] = {}  # of hosts that differ

    def hosts(self) -> list[HostSlots]:
        """Return the hosts with their slots, in the order of ranks."""
        return list(self._hosts)

    async def start_agent(self, host: HostSlots, invitation: bytes) -> asyncio.subprocess.Process:
        """Start an agent through ssh; see Engine."""
        command = [*self.ssh(host), "--", host.name, AGENT_COMMAND_TEXT]
        return await start_child(command, self._place_on(host).stdin(invitation), remedy=REMEDY)

    def explain(self, host: HostSlots, exit_code: int, errors: str) -> str:
        """Return one sentence: why a child of `start_agent` ended, and what to do."""
        if exit_code == SSH_FAILED:
            return explain_ssh(host, errors)
        last = f": {errors.strip().splitlines()[-1]}" if errors.strip() else ""
        return self._place_on(host).explain(host.name, exit_code, errors) or (
            f"the agent on host {host.name} ended with exit code {exit_code}{last}"
        )

    def set_directory(self, host: HostSlots, directory: str) -> None:
        """Let the agent of a host run in another directory, such as the copy that --sync made."""
        self._places[host.name] = replace(self._place, directory=directory)

    def _place_on(self, host: HostSlots) -> AgentPlace:
        return self._places.get(host.name, self._place)

    def ssh(self, host: HostSlots) -> list[str]:
        """Return ssh's words without the host and the command, for this engine and for --sync."""
        options = {**_OPTIONS, **self._sharing(host)}
        words = ["ssh", "-T", *(word for k, v in options.items() for word in ("-o", f"{k}={v}"))]
        words += ["-l", host.user] if host.user else []
        return [*words, "-p", str(host.port)] if host.port is not None else words

    def _sharing(self, host: HostSlots) -> dict[str, str]:
        socket = self._socket(host)
        if len(str(socket).encode()) > _MAX_SOCKET_BYTES:
            return {"ControlMaster": "no", "ControlPath": "none"}
        path = str(socket).replace("%", "%%")  # ssh replaces %h and the like
        return {
            "ControlMaster": "auto",
            "ControlPath": f'"{path}"' if " " in path else path,
            "ControlPersist": str(_KEEP_S),
        }

    def _socket(self, host: HostSlots) -> Path:
        names = [one.name for one in self._hosts]
        if host.name not in names:  # added to a running job
            self._hosts.append(host)
            names.append(host.name)
        number = names.index(host.name)
        return self._directory / f"ssh-{number}"

    async def close(self) -> None:
        """Close the connections to all hosts."""
        await asyncio.gather(*(self._disconnect(host) for host in self._hosts))

    async def _disconnect(self, host: HostSlots) -> None:
        if not self._socket(host).exists():
            return
        child = await asyncio.create_subprocess_exec(
            *(*self.ssh(host), "-O", "exit", "--", host.name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await child.wait()
