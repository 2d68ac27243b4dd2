"""The hosts of a job: where each process runs, and all of them in one table.

A job on one machine has one host, this one. With --hosts, inside an allocation of Slurm, or on Ray,
other hosts have agents (hosts/connect.py, hosts/remote_host.py). A job asks JobHosts to start,
remove and end processes, and never needs to know on which host one runs.

Threads: the launcher's main thread only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.errors import ConfigError, LaunchError
from paceline.launcher.engines.choose import engine_for, prepare_hosts
from paceline.launcher.engines.engine import Engine, SupplyingEngine
from paceline.launcher.environment import (
    HostSettings,
    JobAddresses,
    process_environ,
    template_environ,
)
from paceline.launcher.host import ProcessHost
from paceline.launcher.hosts.connect import HostConnector, JobIdentity, make_invitation
from paceline.launcher.hosts.host_environment import sent_environ, travelling_settings
from paceline.launcher.hosts.host_list import HostSlots
from paceline.launcher.hosts.output_sink import sink_of
from paceline.launcher.hosts.placement import Placement
from paceline.launcher.hosts.reach import is_this_host
from paceline.launcher.hosts.remote_host import RemoteHost
from paceline.launcher.job_registry import JobFacts, encode_spec
from paceline.launcher.preemption.notice import Notice
from paceline.launcher.processes.guard import Sessions
from paceline.launcher.processes.monitor import Signs
from paceline.launcher.processes.process import ProcessOutput, RankProcess
from paceline.launcher.processes.table import ProcessResult, ProcessTable
from paceline.launcher.spec import RunSpec
from paceline.observe.display.display import Display
from paceline.runtime.config import DEFAULT_BIND_ADDRESS
from paceline.runtime.machine import usable_cores
from paceline.runtime.process_names import ProcessName


class JobHosts:
    """All hosts of one job; `on_end` is called once for each process that has ended."""

    def __init__(
        self,
        spec: RunSpec,
        environ: Mapping[str, str],
        job_id: str,
        display: Display,
        on_end: Callable[[RankProcess], None],
        on_change: Callable[[], None],
        *,
        log: Callable[[str], None],
    ) -> None:
        self._spec, self._environ, self._job_id = spec, environ, job_id
        self._display, self._on_change, self._log = display, on_change, log
        self._sink = lambda process: sink_of(process, spec, display)
        self.processes: ProcessTable[RankProcess] = ProcessTable(job_id, on_end)
        self.here = ProcessHost(spec, self.processes, self._sink, on_change, log=log)
        self.placement: Placement | None = spec.placement
        self._here_index: int | None = None  # of this machine in the placement
        self._engine: Engine
        self.supply: SupplyingEngine | None = None  # an engine that finds hosts itself
        self._connector: HostConnector | None = None
        self._remotes: dict[int, RemoteHost] = {}
        self._host_of: dict[int, RemoteHost] = {}  # by rank, of processes on other hosts
        self._starting: set[tuple[int, int]] = set()  # slots of newcomers
        self.leaving: set[str] = set()  # hosts that go away: no process is started there
        self.address = DEFAULT_BIND_ADDRESS  # of this machine, for the other hosts
        self._identity: JobIdentity
        self._facts: JobFacts | None = None
        self.on_interrupt: Callable[[], None]  # an agent was asked to stop the job
        self.on_notice: Callable[[str, Notice], None]  # a host goes away

    # -- start -------------------------------------------------------------------------------

    def start_template(self) -> None:
        """Begin to import what processes on this machine will need."""
        if self._has_processes_here():
            self.here.start_template(self._template_environ(self._environ))

    def _template_environ(self, base: Mapping[str, str]) -> dict[str, str]:
        return template_environ(base, self._spec, self._job_id, cores=usable_cores())

    def _has_processes_here(self) -> bool:
        if self.placement is None:
            return True
        if self._spec.ray is not None:
            return False  # each node of Ray has an agent, also the one of the launcher
        here = [i for i, host in enumerate(self.placement.hosts) if is_this_host(host.name)]
        self._here_index = here[0] if here else None
        return self._here_index in self._needed_hosts()

    def _needed_hosts(self) -> Collection[int]:
        """Return the hosts that run processes; of an elastic job also those that may."""
        assert self.placement is not None
        is_elastic = self._spec.elastic is not None
        return range(len(self.placement.hosts)) if is_elastic else self.placement.used_hosts()

    @property
    def has_others(self) -> bool:
        """Whether processes of the job run on other hosts."""
        return bool(self._remotes)

    def watch(self, guard: Sessions) -> None:
        """Put the processes of this machine under this guard, and notice exits from now on."""
        self.here.watch(guard)

    async def connect(self, secret: bytes, directory: Path) -> None:
        """Connect to the agents of all other hosts; raises LaunchError with all their problems."""
        if self.placement is None:
            return
        self._engine = engine_for(self._spec, self._environ, directory, self._job_id)
        if isinstance(self._engine, SupplyingEngine):
            await self._acquire(self._engine)
        others = {
            index: host
            for index, host in enumerate(self.placement.hosts)
            if index != self._here_index and index in self._needed_hosts()
        }
        if not others:
            return
        identity = JobIdentity(self._job_id, secret)
        self._connector = HostConnector(identity, self._engine, self._make_remote, self._log)
        self._remotes, self._identity = self._connector.connected.remotes, identity
        commands, own = self._connector, self.here.other_children
        self.here.other_children = lambda: {*own(), *commands.pids}
        await self._connect(self._connector, others)
        self.address = self._connector.connected.launcher
        for line in (*self.placement.lines(), *self.placement.notes()):
            self._log(line)

    async def _acquire(self, supply: SupplyingEngine) -> None:
        """Wait for the hosts that the engine finds, and place the processes there."""
        self.supply, own = supply, self.here.other_children
        self.here.other_children = lambda: {*own(), supply.pid}
        with self.here.reaping_paused():
            hosts = await supply.acquire(self._log)
        self._spec = replace(self._spec, hosts=tuple(hosts))
        self.placement = self._spec.placement

    async def _connect(self, connector: HostConnector, hosts: Mapping[int, HostSlots]) -> None:
        def invitation(index: int, addresses: Iterable[str]) -> bytes:
            return make_invitation(
                self._identity,
                index,
                hosts[index],
                tuple(addresses),
                spec=encode_spec(self._spec),
                environ=self._template_environ(travelling_settings(self._environ)),
            )

        is_host = self._here_index in self._needed_hosts()
        with self.here.reaping_paused():  # the engine's commands are children too
            await prepare_hosts(self._engine, self._spec, list(hosts.values()), self._log)
            await connector.connect(hosts, invitation, probes_from_here=is_host)

    def _make_remote(self, host: HostSlots) -> RemoteHost:
        remote = RemoteHost(host, self.processes, self._sink, self._changed, log=self._log)
        remote.on_interrupt = self.on_interrupt
        remote.on_notice = lambda notice: self.on_notice(host.name, notice)
        return remote

    def publish(self, facts: JobFacts) -> None:
        """Let commands like `paceline status` find the job on every host."""
        self._facts = msgspec.structs.replace(facts, launcher_host=socket.gethostname())
        for remote in self._remotes.values():
            remote.publish(self._facts)

    def _changed(self) -> None:
        """A process of another host may have ended."""
        self.processes.check()
        self._on_change()

    async def start(
        self, name: ProcessName, where: JobAddresses, output: Callable[[], ProcessOutput]
    ) -> RankProcess:
        """Start a process on its host; raises LaunchError. `output` is for this machine."""
        settings = self._settings(name)
        if settings is None or settings.place.host_index == self._here_index:
            environ = process_environ(
                self._environ, self._spec, name, where, cores=usable_cores(), host=settings
            )
            return await self.here.start(name, environ, output())
        remote = self._remotes.get(settings.place.host_index)
        if remote is None:
            raise LaunchError(f"{name}: its host has no agent")
        sent = sent_environ(self._environ, self._spec, name, where, settings)
        self._starting.add(name.slot)
        try:
            process = await remote.start(name, sent)
        finally:
            self._starting.discard(name.slot)
        self._host_of[name.rank] = remote
        return process

    def _settings(self, name: ProcessName) -> HostSettings | None:
        """Return what a process must know about its host; None if the job has one machine."""
        if self.placement is None or self._connector is None:
            return None
        if name.is_newcomer:
            self._place_newcomer(name)
        placement = self.placement
        index = placement.host_of(name)
        return HostSettings(
            place=placement.place(name),
            address=self._address_of(index),
            master_address=self._address_of(placement.host_of(ProcessName(0, 0))),
            cores=self._cores_of(index),
        )

    def _place_newcomer(self, name: ProcessName) -> None:
        assert self.placement is not None
        host = self._host_for_newcomer(name)
        if host is None:
            raise LaunchError(f"{name.role} {name.number}: no host has a free slot")
        self.placement = self.placement.with_newcomer(name, host, self._taken())

    def _host_for_newcomer(self, name: ProcessName) -> int | None:
        assert self.placement is not None
        return self.placement.host_for_newcomer(name, self.usable(), self._taken())

    def _taken(self) -> set[tuple[int, int]]:
        """Return the slots of the processes that run or start."""
        return {*(process.name.slot for process in self.processes.running), *self._starting}

    def avoid_host_of(self, name: ProcessName) -> None:
        """Let the replacement of a process run on another host, if one has a free slot."""
        self.placement = self.placement and self.placement.avoiding_host_of(name)

    def _address_of(self, index: int) -> str:
        assert self._connector is not None
        return self._connector.connected.addresses.get(index, self.address)

    def _cores_of(self, index: int) -> int:
        assert self._connector is not None
        facts = self._connector.connected.facts.get(index)
        return usable_cores() if facts is None else facts.cores

    def expect_no_more(self) -> None:
        """End the templates: no further process will be started."""
        self.here.expect_no_more()
        for remote in self._remotes.values():
            remote.expect_no_more()

    # -- changes while the job runs ------------------------------------------------------------

    def host_lines(self) -> list[str]:
        """Return a line for each host of the job, with its processes."""
        assert self.placement is not None
        lost = {index for index, remote in self._remotes.items() if remote.why_lost}
        lines = enumerate(self.placement.lines())
        return [
            line if self._is_living(i) else f"{line}; {'lost' if i in lost else 'left'}"
            for i, line in lines
        ]

    async def add_host(self, host: HostSlots) -> str:
        """Connect to a host and let newcomers run there; return a line about it."""
        if self.placement is None or self._connector is None:
            raise ConfigError(
                f"hosts add {host}: all processes of the job run on the launcher's machine, and its"
                " coordinator listens there only; start the job with another host in --hosts"
            )
        known = {one.name.lower(): i for i, one in enumerate(self.placement.hosts)}
        index, before = known.get(host.name.lower()), self.placement
        if index is None or self._is_living(index):
            self.placement = self.placement.with_host(host)
            index = len(self.placement.hosts) - 1
        else:  # it was lost or removed, and comes back
            await self._connector.disconnect(index)
            self.placement = self.placement.with_slots(index, host)
        try:
            await self._connect(self._connector, {index: host})
        except LaunchError:
            self.placement = before
            raise
        if self._facts is not None:
            self._remotes[index].publish(self._facts)
        return f"host {host.name} is in the job; workers that join may run there"

    async def accept_host(self, host: HostSlots) -> str:
        """Take what the engine says about the room on a host; return a line, or "" for none."""
        assert self.placement is not None
        names = [one.name for one in self.placement.hosts]
        index = names.index(host.name) if host.name in names else None
        if index is not None and self._is_living(index):
            before = self.placement.hosts[index]
            self.placement = self.placement.with_slots(index, host)
            return "" if before == host else f"host {host.name} has room for {host.slots} workers"
        if not host.slots and not host.server_slots:
            return ""
        return await self.add_host(host)

    def has_room(self, name: ProcessName) -> bool:
        """Return whether a host has a free slot for a newcomer."""
        return self.placement is None or self._host_for_newcomer(name) is not None

    @property
    def num_slots(self) -> int:
        """The number of slots on the hosts that live and do not leave."""
        assert self.placement is not None
        return sum(self.placement.hosts[index].slots for index in self.usable())

    def require_other_host(self, name: str) -> None:
        """Raise ConfigError unless this host is in the job and another one than the launcher's."""
        hosts = () if self.placement is None else self.placement.hosts
        names = [host.name for i, host in enumerate(hosts) if self._is_living(i)]
        if name not in names:
            raise ConfigError(f"the job has the hosts {', '.join(names)}; name one of these")
        if name not in self.other_hosts:
            raise ConfigError("the launcher runs there; only other hosts can leave")

    @property
    def other_hosts(self) -> set[str]:
        """The names of the hosts that live and have an agent."""
        return {remote.host.name for remote in self._remotes.values() if remote.is_alive}

    @property
    def num_free_slots(self) -> int:
        """The number of slots on hosts that do not leave and that no worker has."""
        assert self.placement is not None
        hosts, here = self.placement.hosts, self._here_index
        names = {"" if i == here else hosts[i].name for i in self.usable()}
        busy = sum(process.host_name in names for process in self.processes.workers)
        return max(0, self.num_slots - busy)

    async def disconnect(self, name: str, why: str) -> None:
        """End a host's processes and its agent; what still runs there counts as lost."""
        assert self._connector is not None
        for index, remote in list(self._remotes.items()):
            if remote.host.name == name:
                await self._connector.disconnect(index, why)

    def usable(self) -> list[int]:
        """Return the hosts on which a process can be started."""
        hosts = () if self.placement is None else self.placement.hosts
        return [
            i
            for i, host in enumerate(hosts)
            if self._is_living(i) and host.name not in self.leaving
        ]

    def _is_living(self, index: int) -> bool:
        remote = self._remotes.get(index)
        return index == self._here_index or (remote is not None and remote.is_alive)

    # -- watch -------------------------------------------------------------------------------

    def check(self) -> None:
        """Notice exits since the last call, and reap orphans."""
        self.here.check()

    def signs(self, process: RankProcess) -> Signs | None:
        """Return what the host of a process reports about it; None if it runs here."""
        host = self._host_of.get(process.name.rank)
        return None if host is None else host.signs(process)

    async def drain_output(self, those: Iterable[ProcessName]) -> None:
        """Wait a moment until the output of ended processes is read."""
        names = list(those)
        waits = [remote.drain_output(names) for remote in self._remotes.values()]
        await asyncio.gather(self.here.drain_output(names), *waits)

    # -- end ---------------------------------------------------------------------------------

    def remove(self, process: RankProcess) -> ProcessResult:
        """Remove one that has ended while the job continues; what it started ends as well."""
        host = self._host_of.pop(process.name.rank, None) or self.here
        return host.remove(process)

    async def end_all(self) -> None:
        """End every process on every host; also if only some of them were started."""
        remotes = [remote.end_all() for remote in self._remotes.values()]
        for pid in await self.here.end_all():
            self._log(f"process {pid} hangs in the kernel and could not be ended")
        for remote, pids in zip(
            self._remotes.values(), await asyncio.gather(*remotes), strict=True
        ):
            for pid in pids:
                self._log(f"host {remote.host.name}: process {pid} could not be ended")
        self.processes.check()
        self.processes.release()
        if self._connector is not None:
            await self._connector.close()
        elif self.supply is not None:
            await self.supply.close()

    def close(self) -> None:
        """End the template and the guard; call last."""
        self.here.close()
