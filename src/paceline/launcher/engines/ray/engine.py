"""The Ray engine: the launcher's side of the driver.

The engine starts the driver, asks it for room, and starts agents through it. An agent looks to the
launcher like a child process: it has an end, an exit code, and a stream of errors.

Threads: the launcher's loop only.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from paceline.errors import LaunchError
from paceline.launcher.engines.agent_command import AgentPlace
from paceline.launcher.engines.ray import messages as m
from paceline.launcher.engines.ray.connection import WRONG_TOKEN, no_token
from paceline.launcher.engines.ray.function import DIRECTORY_VARIABLE
from paceline.launcher.engines.ray.request import RayRequest
from paceline.launcher.hosts.host_list import HostSlots
from paceline.launcher.preemption.notice import Notice
from paceline.launcher.spec import RunSpec

_MODULE = "paceline.launcher.engines.ray.driver_main"
_END_S = 3.0
_KEEP_LINES = 20
_MAX_LINE_BYTES = 32 << 20  # of an invitation, and of errors
_decoder: msgspec.json.Decoder[m.FromDriver] = msgspec.json.Decoder(m.FromDriver)


class RayEngine:
    """Starts agents on the nodes of a Ray cluster that have room for the job."""

    name = "ray"

    def __init__(
        self,
        spec: RunSpec,
        place: AgentPlace,
        environ: Mapping[str, str],
        job_id: str,
    ) -> None:
        self._request = spec.ray or RayRequest()
        self._spec, self._place = spec, place
        self._environ, self._job_id = environ, job_id
        self._driver: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Future[None]] = []
        self._acquired: asyncio.Future[tuple[m.Room, ...]]
        self._rooms: asyncio.Queue[m.Room] = asyncio.Queue()
        self._agents: dict[str, RayAgent] = {}
        self._why: dict[str, str] = {}  # by host, why its agent ended
        self._errors: deque[str] = deque(maxlen=_KEEP_LINES)
        self._hosts: list[HostSlots] = []
        self._log: Callable[[str], None] = lambda _: None
        self.replaces_early = True
        self.on_notice: Callable[[str, Notice], None] = lambda host, notice: None  # noqa: ARG005

    @property
    def pid(self) -> int | None:
        return None if self._driver is None else self._driver.pid

    def hosts(self) -> list[HostSlots]:
        """Return the nodes that Ray gave to the job at its start."""
        return list(self._hosts)

    # -- room ------------------------------------------------------------------------------------

    async def acquire(self, log: Callable[[str], None]) -> list[HostSlots]:
        """Wait until Ray has room for the job; return the nodes. Raises LaunchError."""
        self._log = log
        self._acquired = asyncio.get_running_loop().create_future()
        await self._start_driver()
        spec, elastic = self._spec, self._spec.elastic
        self._send(
            m.Acquire(
                job_id=self._job_id,
                address=self._request.address,
                workers=spec.num_workers,
                more_workers=0 if elastic is None else elastic.max_workers - spec.num_workers,
                servers=self._num_server_bundles,
                resources=dict(self._request.resources),
                strategy=self._request.strategy,
                wait_s=self._request.wait_s,
                function=self._environ.get(DIRECTORY_VARIABLE, ""),
            )
        )
        self._hosts = [self._slots(room) for room in await self._acquired]
        return self.hosts()

    @property
    def _num_server_bundles(self) -> int:
        """Return how many servers have room of their own; a colocated one shares its worker's."""
        return 0 if self._spec.servers.is_colocated else self._spec.num_servers

    def _slots(self, room: m.Room) -> HostSlots:
        return HostSlots(
            room.host,
            room.workers,
            server_slots=None if self._spec.servers.is_colocated else room.servers,
        )

    async def next_host(self) -> HostSlots:
        """Wait for a node with more or less room than before, or whose agent has ended."""
        return self._slots(await self._rooms.get())

    def want(self, workers: int, servers: int, busy: Mapping[str, int]) -> None:
        """Ask for room for so many processes in all, or give back what no worker uses."""
        servers = 0 if self._spec.servers.is_colocated else servers
        self._send(m.Want(workers, servers, dict(busy)))

    # -- the driver ------------------------------------------------------------------------------

    async def _start_driver(self) -> None:
        try:
            self._driver = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(self._environ),
                start_new_session=True,  # Ctrl-C is for the launcher alone
                limit=_MAX_LINE_BYTES,
            )
        except OSError as error:
            raise LaunchError(f"cannot start the driver for Ray: {error.strerror}") from error
        self._tasks = [
            asyncio.ensure_future(self._read(self._driver)),
            asyncio.ensure_future(self._read_errors(self._driver)),
        ]

    def _send(self, message: m.ToDriver) -> None:
        if self._driver is not None and self._driver.stdin is not None:
            with suppress(OSError, RuntimeError):  # its end is noticed where it is read
                self._driver.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _read(self, driver: asyncio.subprocess.Process) -> None:
        assert driver.stdout is not None
        while line := await driver.stdout.readline():
            self._on_message(_decoder.decode(line))
        code = await driver.wait()
        last = next((line for line in reversed(self._errors) if line), "it printed nothing")
        why = f"the driver for Ray ended with exit code {code}: {last[:300]}"
        if not self._acquired.done():
            self._acquired.set_exception(LaunchError(why))
        for host in list(self._agents):
            self._end_agent(host, 1, why)

    async def _read_errors(self, driver: asyncio.subprocess.Process) -> None:
        """Keep what Ray prints, for a driver that fails without a message."""
        assert driver.stderr is not None
        while line := await driver.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self._errors.append(text)
            if WRONG_TOKEN in text and not self._acquired.done():
                # Ray would try for 20 s more, and then not say why.
                self._acquired.set_exception(LaunchError(no_token(self._request.address)))

    def _on_message(self, message: m.FromDriver) -> None:
        if isinstance(message, m.Acquired):
            if not self._acquired.done():
                self._acquired.set_result(message.rooms)
        elif isinstance(message, m.Refused):
            if not self._acquired.done():
                self._acquired.set_exception(LaunchError(message.why))
        elif isinstance(message, m.Room):
            self._rooms.put_nowait(message)
        elif isinstance(message, m.Draining):
            self.on_notice(message.host, Notice(message.why, message.within_s))
        elif isinstance(message, m.Said):
            self._log(message.text)
        elif isinstance(message, m.AgentSaid) and message.host in self._agents:
            self._agents[message.host].stderr.feed_data(message.text.encode() + b"\n")
        elif isinstance(message, m.AgentEnded):
            self._end_agent(message.host, message.exit_code, message.why)

    # -- agents ----------------------------------------------------------------------------------

    async def start_agent(self, host: HostSlots, invitation: bytes) -> RayAgent:
        """Start an agent as a child of an actor; see Engine."""
        if self._driver is None or self._driver.returncode is not None:
            raise LaunchError("the driver for Ray has ended; no node can be added")
        python = self._place.python if self._spec.names_remote_python(self._environ) else ""
        agent = self._agents[host.name] = RayAgent(host.name, self._driver.pid, self._send)
        self._why.pop(host.name, None)
        self._send(
            m.StartAgent(
                host=host.name,
                directory=self._place.directory,
                python=python,
                activation=self._place.activation,
                module=self._place.module,
                invitation=invitation.decode(),
            )
        )
        return agent

    def _end_agent(self, host: str, code: int, why: str) -> None:
        agent = self._agents.pop(host, None)
        if agent is not None:
            self._why[host] = why
            agent.end(code)

    def explain(self, host: HostSlots, exit_code: int, errors: str) -> str:
        """Return one sentence: why an agent ended, and what to do."""
        del errors
        return self._why.get(host.name) or (
            f"the agent on host {host.name} ended with exit code {exit_code}"
        )

    async def close(self) -> None:
        """End the driver, and with it what Ray holds for the job."""
        if self._driver is None:
            return
        if self._driver.stdin is not None:
            self._driver.stdin.close()
        try:
            await asyncio.wait_for(self._driver.wait(), _END_S)
        except asyncio.TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                self._driver.kill()
            for task in self._tasks:
                task.cancel()


class RayAgent:
    """An agent on a node, as the launcher sees the child of another engine."""

    def __init__(self, host: str, pid: int, send: Callable[[m.ToDriver], None]) -> None:
        self.host, self.pid, self._send = host, pid, send
        self.stdin = self  # the life line: `close` is all that the launcher does with it
        self.stderr = asyncio.StreamReader()
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def close(self) -> None:
        """Close the agent's standard input."""
        if self.returncode is None:
            self._send(m.EndAgent(self.host))

    def kill(self) -> None:
        if self.returncode is None:
            self._send(m.EndAgent(self.host, is_kill=True))

    async def wait(self) -> int:
        await self._ended.wait()
        return self.returncode or 0

    def end(self, code: int) -> None:
        """The driver has reported the end of the agent."""
        self.returncode = code
        self.stderr.feed_eof()
        self._ended.set()
