"""An engine of a test's own: hosts take agents through sockets in a directory that all share.

    python spool_engine.py serve DIRECTORY/b      on host b: run an agent for each connection
    python spool_engine.py run DIRECTORY ...      on host a: `paceline run ...` with this engine

It shows how little an engine has to know: a byte stream to a program on the other host.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from paceline.launcher.engines import choose
from paceline.launcher.engines.agent_command import AGENT_COMMAND, AgentPlace
from paceline.launcher.engines.engine import start_child
from paceline.launcher.hosts.host_list import HostSlots


class SpoolEngine:
    """Starts agents through sockets in a shared directory."""

    name = "spool"

    def __init__(self, hosts: tuple[HostSlots, ...], place: AgentPlace, directory: Path) -> None:
        self._hosts, self._place, self._directory = hosts, place, directory

    def hosts(self) -> list[HostSlots]:
        return list(self._hosts)

    async def start_agent(self, host: HostSlots, invitation: bytes) -> asyncio.subprocess.Process:
        command = [sys.executable, __file__, "connect", str(self._directory / host.name)]
        return await start_child(command, self._place.stdin(invitation), remedy="see the test")

    def explain(self, host: HostSlots, exit_code: int, errors: str) -> str:
        return f"the spool of host {host.name} ended with {exit_code}: {errors}"

    async def close(self) -> None:
        pass


def serve(path: str) -> None:
    """Run the agent command for each connection, with the connection as its standard input."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                subprocess.Popen(AGENT_COMMAND, stdin=connection, stderr=connection)


def connect(path: str) -> None:
    """Copy standard input to a host, and what it answers to standard error."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(path)
        threading.Thread(target=_copy, args=(0, stream), daemon=True).start()
        while data := stream.recv(1 << 16):
            os.write(2, data)


def _copy(fd: int, stream: socket.socket) -> None:
    while data := os.read(fd, 1 << 16):
        stream.sendall(data)
    stream.shutdown(socket.SHUT_WR)


def run(directory: str, arguments: list[str]) -> None:
    """Run `paceline` with this engine in place of ssh."""
    spool = Path(directory)
    choose.ENGINES["ssh"] = lambda given: SpoolEngine(given.spec.hosts, given.place, spool)
    from paceline.cli.main import main

    sys.argv = ["paceline", "run", *arguments]
    main()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    elif sys.argv[1] == "connect":
        connect(sys.argv[2])
    else:
        run(sys.argv[2], sys.argv[3:])
