"""What runs in a pod with workers or servers: waits for the launcher, and runs an agent for it.

    python -m paceline.launcher.engines.kubernetes.pod

It listens at the pod's address and serves only a launcher that proves with the mounted secret that
it belongs to the same job. If another launcher comes (the coordinator's pod was replaced), the
agent of the former one ends first. On SIGTERM the launcher learns that this host goes away: an
elastic job continues without it, another one saves and ends. This program ends after its agent.
Its exit code is never 0: Kubernetes would take the pod for finished and not replace it; the success
of the coordinator ends all pods.

Threads: one loop on the main thread.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paceline.control.transport.acceptor import Acceptor, Wire
from paceline.control.transport.auth import Hello, Session, load_secret
from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import listen_tcp
from paceline.errors import ConfigError, PacelineError
from paceline.launcher.engines.kubernetes import agent_relay as relay
from paceline.launcher.engines.kubernetes.heartbeat import beat
from paceline.launcher.engines.kubernetes.pods import JOB, PORT, SECRET_FILE
from paceline.runtime.config import inherited_environ, runtime_dir
from paceline.runtime.console import say, warn

UNUSABLE = 2
TERMINATED = 128 + signal.SIGTERM


class Pod:
    """The program of one pod; `run` is called once."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._job, self._directory = _needed(environ, JOB), Path(runtime_dir(environ))
        self._address = _needed(environ, "POD_IP")
        secret = load_secret(_needed(environ, SECRET_FILE), is_mounted=True)
        self._acceptor = Acceptor(secret, job_id=self._job, listener=relay.POD, admit=self._admit)
        self._serving: asyncio.Task[None] | None = None
        self._agent: asyncio.subprocess.Process | None = None
        self._channel: Channel[relay.Input] | None = None  # of the agent
        self._terminated = asyncio.Event()

    async def run(self) -> int:
        """Serve launchers until SIGTERM; return the exit code. Raises SetupError."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        beating = asyncio.ensure_future(beat(self._directory))
        self._acceptor.open(listen_tcp(self._address, PORT))
        say(f"pod {socket.gethostname()} waits for the launcher of job {self._job}")
        await self._terminated.wait()
        if self._serving is not None:
            await asyncio.wait([self._serving])  # kubelet ends the wait
        await self._acceptor.close()
        beating.cancel()
        return TERMINATED

    def _on_terminate(self) -> None:
        self._terminated.set()
        if self._agent is not None and self._channel is not None:
            with suppress(OSError, PacelineError, ProcessLookupError):
                self._channel.send(relay.Leaving())
                self._agent.send_signal(signal.SIGPWR)  # it asks the launcher what to do

    async def _admit(self, wire: Wire, session: Session, caller: Hello) -> None:
        channel = await Channel.over(wire, session, relay.channel_decoder())
        if caller.role != relay.LAUNCHER or self._terminated.is_set():
            channel.close()
            return
        if caller.purpose == relay.LOOK:
            channel.send(relay.Here())
            await channel.finish()
            return
        before = self._serving
        me = self._serving = asyncio.current_task()
        if before is not None and not before.done():
            say("another launcher takes over")
            before.cancel()
            await asyncio.wait([before])
        try:
            self._channel = channel
            await relay.serve_agent(channel, _show, self._on_agent)
        finally:
            if self._serving is me:
                self._serving = self._agent = self._channel = None

    def _on_agent(self, child: asyncio.subprocess.Process) -> None:
        self._agent = child
        say("the launcher is here; its agent starts")


def _show(data: bytes) -> None:
    for line in data.decode(errors="replace").splitlines():
        say(line)


def _needed(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ConfigError(
            f"{name} is not set; this program runs in pods that `paceline run --on kubernetes` made"
        )
    return value


def main() -> int:
    """Run the program; return its exit code."""
    try:
        return asyncio.run(Pod(inherited_environ()).run())
    except PacelineError as error:
        warn(str(error))
        return UNUSABLE


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
