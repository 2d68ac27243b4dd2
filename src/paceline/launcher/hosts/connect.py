"""Connects the launcher to the agents of all other hosts, and checks every host before the start.

    engine starts agents -> agents connect -> facts -> hosts probe each other -> addresses

All hosts are asked at the same time. Whatever is wrong, on whichever host, is in one report, and
nothing has been started then.

Threads: the launcher's loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from paceline import __version__
from paceline.control.transport.acceptor import Acceptor, Wire
from paceline.control.transport.auth import Hello, Session
from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import die_soon, join_address, listen_tcp
from paceline.errors import LaunchError, SetupError
from paceline.launcher.engines.engine import AgentChild, Engine
from paceline.launcher.hosts import messages as m
from paceline.launcher.hosts.host_check import (
    Problem,
    fact_problems,
    host_addresses,
    launcher_address,
    report,
    twins,
    warnings,
)
from paceline.launcher.hosts.host_list import HostSlots
from paceline.launcher.hosts.reach import addresses_towards, host_part, probe
from paceline.launcher.hosts.remote_host import RemoteHost

_FACTS_S = 60.0  # for an agent to start and connect
_NOTICE_S = 2.0
_STOP_S = 2.0  # for the engine's command to end after its agent
_KILL_S = 0.5
_KEEP_LINES = 20
_decoder: msgspec.msgpack.Decoder[m.FromAgent] = msgspec.msgpack.Decoder(m.FromAgent)


@dataclass(frozen=True)
class JobIdentity:
    """What proves to an agent that it belongs to a job."""

    job_id: str
    secret: bytes


@dataclass
class Connected:
    """The hosts of a job that answered, by their index."""

    remotes: dict[int, RemoteHost] = field(default_factory=dict)
    facts: dict[int, m.HostFacts] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)
    launcher: str = ""  # the address of this host that all others reach


class HostConnector:
    """The agents of one job. `make_remote` makes the launcher's side of a host."""

    def __init__(
        self,
        identity: JobIdentity,
        engine: Engine,
        make_remote: Callable[[HostSlots], RemoteHost],
        log: Callable[[str], None],
    ) -> None:
        self._identity, self._engine, self._log = identity, engine, log
        self._make_remote = make_remote
        self._acceptor = Acceptor(
            identity.secret, job_id=identity.job_id, listener=m.LAUNCHER, admit=self._admit
        )
        self._addresses: list[str] = []  # where this host listens, host:port
        self.connected = Connected()
        self._commands: dict[int, AgentCommand] = {}

    async def connect(
        self,
        hosts: Mapping[int, HostSlots],
        invitation: Callable[[int, Sequence[str]], bytes],
        *,
        probes_from_here: bool,
    ) -> Connected:
        """Start agents on these hosts and check them; raises LaunchError with all problems.

        `invitation` makes the invitation for a host, given the addresses of the launcher.
        `probes_from_here`: this machine is a host of the job too.
        """
        self._listen(hosts.values())
        found = self.connected
        new = list(hosts)
        for index in new:
            found.remotes[index] = self._make_remote(hosts[index])
        problems = await self._start_agents(
            {index: (hosts[index], invitation(index, self._addresses)) for index in new}
        )
        facts = {hosts[index].name: found.facts[index] for index in new if index in found.facts}
        for name, one in facts.items():
            problems += fact_problems(name, one)
            for line in warnings(name, one, time.time()):
                self._log(line)
        living = {i: remote for i, remote in found.remotes.items() if remote.is_alive}
        problems += twins({living[i].host.name: found.facts[i] for i in living})
        if not problems:
            problems += await self._find_addresses(probes_from_here)
        if problems:
            await asyncio.gather(*(self.disconnect(index) for index in new))
            raise LaunchError(report(problems))
        return found

    def _listen(self, hosts: Iterable[HostSlots]) -> None:
        known = {host_part(one) for one in self._addresses}
        for address in addresses_towards([host.name for host in hosts]):
            if address not in known:
                with suppress(SetupError):
                    listener = listen_tcp(address)
                    self._acceptor.open(listener)
                    self._addresses.append(join_address(address, listener.getsockname()[1]))
        if not self._addresses:
            raise LaunchError(
                "this machine has no address that other hosts could reach; check its network"
            )

    async def _admit(self, wire: Wire, session: Session, caller: Hello) -> None:
        remote = self.connected.remotes.get(caller.rank)
        if remote is None or caller.role != m.ROLE:
            wire.close()
            return
        channel = await Channel.over(wire, session, _decoder)
        die_soon(channel.socket)
        await remote.serve(channel)

    async def _start_agents(self, invited: Mapping[int, tuple[HostSlots, bytes]]) -> list[Problem]:
        waits = {
            asyncio.ensure_future(self._start_agent(index, host, text)): host.name
            for index, (host, text) in invited.items()
        }
        pending, notice_s = set(waits), _NOTICE_S
        while pending:
            done, pending = await asyncio.wait(pending, timeout=notice_s)
            if pending and not done:
                notice_s *= 2  # a pod may be pending for long
                names = ", ".join(sorted(waits[task] for task in pending))
                self._log(f"waiting for {self._engine.name} to start agents on {names}")
        return [problem for task in waits for problem in task.result()]

    async def _start_agent(self, index: int, host: HostSlots, invitation: bytes) -> list[Problem]:
        """Start one agent and wait for its facts; return what went wrong."""
        remote = self.connected.remotes[index]
        try:
            child = await self._engine.start_agent(host, invitation)
        except (LaunchError, OSError) as error:
            return [Problem(host.name, str(error))]
        command = self._commands[index] = AgentCommand(
            child, remote, lambda text: self._log(f"host {host.name}: {text}")
        )
        ended = asyncio.ensure_future(command.ended.wait())
        waits: set[asyncio.Future[object]] = {remote.facts, ended}  # type: ignore[arg-type]
        await asyncio.wait(waits, timeout=_FACTS_S, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if remote.facts.done():
            self.connected.facts[index] = remote.facts.result()
            return []
        if command.ended.is_set():
            code = child.returncode if child.returncode is not None else 1
            own = [line for line in command.lines if line.startswith(m.AGENT_PREFIX)]
            if own:
                return [Problem(host.name, own[-1].removeprefix(m.AGENT_PREFIX))]
            text = self._engine.explain(host, code, "\n".join(command.lines))
            return [Problem(host.name, text)]
        last = f"; it printed: {command.lines[-1]}" if command.lines else ""
        return [Problem(host.name, f"its agent has not connected in {_FACTS_S:g} s{last}")]

    async def _find_addresses(self, probes_from_here: bool) -> list[Problem]:
        """Let all hosts probe each other, and choose the addresses of those that have none."""
        found = self.connected
        living = {i: remote for i, remote in found.remotes.items() if remote.is_alive}
        facts = {i: found.facts[i] for i in living}
        names = {i: remote.host.name for i, remote in living.items()}
        candidates = [found.launcher] if found.launcher else [*map(host_part, self._addresses)]
        reached = {names[i]: [*map(host_part, one.launcher)] for i, one in facts.items()}
        launcher, problems = launcher_address(candidates, reached)
        if problems:
            return problems
        found.launcher = launcher
        own = {i: host_part(one.addresses[0]) if one.addresses else "?" for i, one in facts.items()}
        targets = {i: m.ProbeTarget(i, one.addresses) for i, one in facts.items()}
        waits = {
            index: remote.probe([t for i, t in targets.items() if i != index])
            for index, remote in living.items()
        }
        answers = await asyncio.gather(*waits.values())
        probes = {i: answer.results for i, answer in zip(waits, answers, strict=True)}
        if probes_from_here:
            here = -1
            names[here], own[here] = "the launcher", found.launcher
            probes[here] = tuple(
                await probe(targets.values(), self._identity.secret, self._identity.job_id, here)
            )
        listening = {i: one.addresses for i, one in facts.items() if i not in found.addresses}
        chosen, problems = host_addresses(names, listening, probes, own)
        found.addresses.update(chosen)
        return problems

    async def disconnect(self, index: int, why: str = "it was removed from the job") -> None:
        """End a host's processes, its agent, and the engine's command."""
        found = self.connected
        remote = found.remotes.pop(index, None)
        found.facts.pop(index, None)
        found.addresses.pop(index, None)
        if remote is not None:
            await remote.dismiss(why)
        command = self._commands.get(index)
        if command is not None:
            await command.stop()
            await command.kill()
            if self._commands.get(index) is command:  # until now it is a known child
                del self._commands[index]

    @property
    def pids(self) -> set[int]:
        """The pids of the engine's commands on this machine."""
        return {command.pid for command in self._commands.values()}

    async def close(self) -> None:
        """End all connections, and the engine's commands."""
        commands = self._commands.values()
        await asyncio.gather(*(command.stop() for command in commands))
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._engine.close(), _STOP_S)
        await asyncio.gather(*(command.kill() for command in commands))
        await self._acceptor.close()


class AgentCommand:
    """The engine's command that runs an agent: its life line, and what it prints."""

    def __init__(
        self,
        child: AgentChild,
        remote: RemoteHost,
        log: Callable[[str], None],
    ) -> None:
        self._child, self._remote, self._log = child, remote, log
        self.pid = child.pid
        self.lines: deque[str] = deque(maxlen=_KEEP_LINES)
        self.ended = asyncio.Event()
        self._is_stopping = False
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        assert self._child.stderr is not None
        while line := await self._child.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self.lines.append(text)
            if self._remote.facts.done() and text and not self._is_stopping:
                self._log(text)
        await self._child.wait()
        self.ended.set()
        if self._remote.facts.done():
            self._remote.lose("the command that runs its agent ended")

    async def stop(self) -> None:
        """Close the life line, and wait a moment for the command to end."""
        self._is_stopping = True
        if self._child.stdin is not None:
            self._child.stdin.close()
        within_s = 0.0 if self._remote.why_lost else _STOP_S  # a lost host does not answer
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._watching), within_s)

    async def kill(self) -> None:
        """Kill the command if it has not ended."""
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                self._child.kill()
            # It ends for asyncio when its pipes are closed, which a process of its own may hold.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._watching), _KILL_S)
        self._watching.cancel()


def make_invitation(
    identity: JobIdentity,
    index: int,
    host: HostSlots,
    addresses: Sequence[str],
    *,
    spec: msgspec.Raw,
    environ: dict[str, str],
) -> bytes:
    """Return the invitation for one host."""
    return m.Invitation(
        version=__version__,
        job_id=identity.job_id,
        secret=identity.secret.hex(),
        host_index=index,
        host_name=host.name,
        addresses=tuple(addresses),
        spec=spec,
        environ=environ,
    ).encode()
