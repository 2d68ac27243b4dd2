"""Planned leaves of hosts: a notice, or `paceline hosts remove`, becomes a hand-over in time.

    notice      no process starts there any more; its members leave as planned (the coordinator's
                roster moves partitions and releases workers after a step), and replacements start
                on other hosts if there is room
    late        at 60 % of the time: workers do not wait for replacements any more
    left        all its processes have exited: the agent ends, and one line says what it took
    too late    the time is over: the rest counts as lost, and a line says so
    withdrawn   what has not left yet stays

If too few workers would be left, or no host for the servers, all workers save and the job ends with
exit code 75, as when the job itself is asked to stop. The same follows if a server with the only
copy of a partition cannot hand it over in time.

Threads: the launcher's loop only.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.launcher.preemption.notice import DEFAULT_S, Notice
from paceline.launcher.processes.process import RankProcess
from paceline.observe.telemetry.events import (
    BackupCaughtUp,
    MembershipEvent,
    PartitionsMoved,
    Promoted,
)
from paceline.runtime.process_names import ProcessName, names

if TYPE_CHECKING:
    from paceline.launcher.elastic.job import ElasticJob

_TICK_S = 0.1
_TOGETHER_S = 1.0  # between the first and the last host that is told
_LATE = 0.6  # of the time: workers do not wait for replacements any more
_SAVE = 0.8  # of the time: a server with the only copy of something is still there
REMOVAL_S = 120.0  # for `paceline hosts remove`
# How long a host has after a notice without a time, by engine; else DEFAULT_S. Kubernetes: the
# pod's terminationGracePeriodSeconds, less the time for its program to end.
ENGINE_S = {"kubernetes": 45.0, "slurm": 30.0}


@dataclass
class Departure:
    """One host that goes away."""

    host: str
    why: str
    within_s: float
    is_for_job: bool = False  # perhaps a scheduler ends the whole job
    begun_s: float = field(default_factory=time.monotonic)
    ranks: dict[int, ProcessName] = field(default_factory=dict)  # all processes that were there
    partitions: set[int] = field(default_factory=set)  # that have moved away
    is_withdrawn: bool = False
    is_over: bool = False

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.begun_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.within_s - self.took_s)


class HostDepartures:
    """The hosts of one elastic job that go away."""

    def __init__(self, job: ElasticJob) -> None:
        self._job = job
        self._under_way: dict[str, Departure] = {}
        self._done: list[Departure] = []
        self._num_lost = 0  # members that could not leave in time

    # -- what begins one -----------------------------------------------------------------------

    def on_notice(self, host: str, notice: Notice) -> None:
        """Let a host leave because of a notice, or stay because the notice was withdrawn."""
        found = self._under_way.get(host)
        if notice.is_withdrawn:
            if found is not None:
                found.is_withdrawn = True
        elif found is None:
            self._job.start_task(self._leave_after_notice(host, notice))

    async def _leave_after_notice(self, host: str, notice: Notice) -> None:
        try:
            await self.leave(host, notice.why, self._seconds(notice), notice)
        except ConfigError as error:
            self._job.log(f"host {host}: {notice.why}: {error}")

    def _seconds(self, notice: Notice) -> float:
        given_s = self._job.spec.preemption_deadline_s
        if notice.within_s is not None:
            return notice.within_s
        return given_s or ENGINE_S.get(self._job.spec.engine, DEFAULT_S)

    async def leave(
        self, host: str, why: str, within_s: float, notice: Notice | None = None
    ) -> str:
        """Let a host leave; return a line about it, which is logged, too. Raises ConfigError."""
        job = self._job
        job.hosts.require_other_host(host)
        if host in self._under_way:
            raise ConfigError(f"host {host} is already leaving: {self._under_way[host].why}")
        is_for_job = notice is not None and notice.is_for_job
        departure = self._under_way[host] = Departure(host, why, within_s, is_for_job)
        self._publish()
        try:
            if notice is not None:  # if all hosts go, their notices come at about the same time
                await asyncio.sleep(min(_TOGETHER_S, within_s / 10))
            line = await self._leave(departure)
        finally:
            del self._under_way[host]
            self._publish()
        if line:
            job.log(line)
        return line

    def _publish(self) -> None:
        """Start no process on hosts that leave, and let `paceline jobs` show them."""
        job = self._job
        job.hosts.leaving = set(self._under_way)
        job.resources.show_hosts({host: "leaving" for host in self._under_way})

    # -- one of them ---------------------------------------------------------------------------

    async def _leave(self, departure: Departure) -> str:
        job, host = self._job, departure.host
        if job.event_log.membership is None:  # the job is still starting, and starts again
            await job.hosts.disconnect(host, f"{departure.why}, before all processes had joined")
            return f"host {host} is gone: {departure.why}; not all processes had joined yet"
        if job.is_ending:
            return ""
        here = self._running(departure)
        workers = [one for one in here if one.name.is_worker]
        servers = [one for one in here if one.name.is_server]
        problem = self._shortage(workers, servers)
        if problem:
            self._save_and_stop(departure, problem)
            return ""
        waits = self._wait_for_replacements(workers, servers)
        job.log(_announcement(departure))
        return await self._hand_over(departure, waits)

    def _running(self, departure: Departure) -> list[RankProcess]:
        found = [p for p in self._job.processes.running if p.host_name == departure.host]
        departure.ranks.update((process.name.rank, process.name) for process in found)
        return found

    def _wait_for_replacements(
        self, workers: Collection[RankProcess], servers: Collection[RankProcess]
    ) -> tuple[bool, bool]:
        """Return whether workers, and servers, are to wait until replacements are ready."""
        job, supply = self._job, self._job.hosts.supply
        if supply is not None:
            if supply.replaces_early:
                job.ask_for_room(len(workers), len(servers))
            return supply.replaces_early, supply.replaces_early
        return job.hosts.num_free_slots >= len(workers), bool(job.hosts.usable())

    def _shortage(self, workers: Collection[RankProcess], servers: Collection[RankProcess]) -> str:
        """Return why the job cannot continue without what is on leaving hosts; "" if it can."""
        job, plan = self._job, self._job.plan
        leaving = set(self._under_way)
        is_for_job = all(one.is_for_job for one in self._under_way.values())
        if job.spec.engine == "slurm" and is_for_job and leaving >= job.hosts.other_hosts:
            return "Slurm ends all hosts"
        staying = [p for p in job.processes.workers if p.host_name not in leaving]
        staying_servers = [p for p in job.processes.servers if p.host_name not in leaving]
        room = job.hosts.num_free_slots
        room -= room % job.unit_size
        if workers and not staying and (not room or len(workers) <= job.unit_size):
            return "no other host has a worker with the training state"
        count = min(len(staying) + room, len(job.processes.workers))
        if workers and count < plan.min_workers:
            return f"{count} workers would be left, expected at least {plan.min_workers} (--min)"
        if workers and room < len(workers) and plan.on_loss == "replace" and not job.hosts.supply:
            return "no other host has room for its workers (--on-loss replace)"
        if servers and not staying_servers and not job.hosts.usable():
            return "no other host is left for its servers"
        return ""

    def _save_and_stop(self, departure: Departure, problem: str) -> None:
        self._job.log(
            f"host {departure.host} goes away in {departure.within_s:.0f} s ({departure.why}), and"
            f" {problem}: the job saves and stops"
        )
        self._job.save_and_stop()

    async def _hand_over(self, departure: Departure, waits: tuple[bool, bool]) -> str:
        """Wait until everything has left; return a line about it."""
        job, asked = self._job, None
        while here := self._running(departure):
            if job.is_ending:
                return ""
            if departure.is_withdrawn:
                return await self._stay(departure, here)
            if departure.took_s >= departure.within_s:
                return await self._give_up(departure, here)
            if departure.took_s >= _SAVE * departure.within_s and (alone := self._alone(here)):
                self._save_and_stop(departure, f"server {alone[0].number} has the only copy")
                return ""
            is_late = departure.took_s >= _LATE * departure.within_s
            wanted = (_members(job, here), is_late)
            if wanted != asked:
                await self._plan(departure, here, waits if not is_late else (False, False))
                asked = wanted
            await asyncio.sleep(_TICK_S)
        return await self._finish(departure)

    async def _plan(
        self, departure: Departure, here: Iterable[RankProcess], waits: tuple[bool, bool]
    ) -> None:
        """Let the members leave; end processes that have not joined yet."""
        job, known = self._job, set(_members(self._job, here))
        for process in here:
            job.board.set_state(process.name.rank, "leaving")
            if not job.was_member(process.name.rank):
                process.signal_group(signal.SIGKILL)
        for is_server, wait in enumerate(waits):
            ranks = [p.name.rank for p in here if p.name.is_server == bool(is_server)]
            if known.intersection(ranks):
                await job.control.plan_leave(ranks, waits=wait, why=departure.why)

    def _alone(self, here: Iterable[RankProcess]) -> list[ProcessName]:
        """Return the servers that have the only copy of a partition."""
        membership = self._job.event_log.membership
        assert membership is not None
        only = {holders[0] for holders in membership.holders if len(holders) == 1}
        return [p.name for p in here if p.name.is_server and p.name.rank in only]

    # -- how one ends --------------------------------------------------------------------------

    async def _finish(self, departure: Departure) -> str:
        lost = self._lost(departure)
        self._end(departure)
        words = self._handed_over(departure, lost)
        took_s = departure.took_s
        await self._job.hosts.disconnect(departure.host, departure.why)
        self._job.ask_for_room(0, 0)
        end = "" if lost else "; no step is repeated"
        return f"host {departure.host} has left after {took_s:.1f} s: {words}{end}"

    async def _stay(self, departure: Departure, here: Collection[RankProcess]) -> str:
        job, left = self._job, len(departure.ranks) - len(here)
        await job.control.plan_leave([p.name.rank for p in here], is_withdrawn=True)
        for process in here:
            job.board.set_state(process.name.rank, "running")
        job.start_task(self._fill_again())
        gone = f"; {left} of its processes had left" if left else ""
        return f"host {departure.host} stays: the notice ({departure.why}) was withdrawn{gone}"

    async def _fill_again(self) -> None:
        await asyncio.sleep(_TICK_S)  # the host counts again
        for wanted in await self._job.control.wanted():
            self._job.on_wanted(wanted)

    async def _give_up(self, departure: Departure, here: Collection[RankProcess]) -> str:
        late = names(process.name for process in here)
        self._num_lost += len(here)
        self._end(departure)
        why = f"{departure.within_s:.0f} s after the notice it had not left"
        await self._job.hosts.disconnect(departure.host, why)
        return (
            f"host {departure.host}: {departure.within_s:.0f} s are over ({departure.why}), and"
            f" {late} had not left: lost"
        )

    def _end(self, departure: Departure) -> None:
        departure.is_over = True
        self._done.append(departure)

    def _lost(self, departure: Departure) -> list[ProcessName]:
        lost = self._job.event_log.lost_ranks
        return [name for rank, name in departure.ranks.items() if rank in lost]

    def _handed_over(self, departure: Departure, lost: Collection[ProcessName]) -> str:
        left = [name for name in departure.ranks.values() if name not in lost]
        workers = [name for name in left if name.is_worker]
        words = []
        if workers:
            words.append(f"{names(workers)} after step {self._job.event_log.step}")
        servers = [name for name in left if name.is_server]
        if servers:
            count = len(departure.partitions)
            what = f"{count} partition{'s' if count != 1 else ''}"
            words.append(f"{names(servers)} with {what} handed over")
        if lost:
            self._num_lost += len(lost)
            words.append(f"{names(lost)} lost before")
        return ", ".join(words) or "no process was there"

    # -- for people ----------------------------------------------------------------------------

    def is_leaving(self, rank: int) -> bool:
        """Return whether a process leaves with its host: its lines are in those about the host."""
        return any(rank in one.ranks for one in self._under_way.values())

    def absorbs(self, event: MembershipEvent) -> bool:
        """Return whether an event about partitions belongs to a departure, which counts it."""
        if not self._under_way or not isinstance(
            event, (PartitionsMoved, BackupCaughtUp, Promoted)
        ):
            return False
        if isinstance(event, PartitionsMoved):
            for one in self._under_way.values():
                numbers = {name.number for name in one.ranks.values() if name.is_server}
                if event.source in numbers:
                    one.partitions.update(event.partitions)
        return not isinstance(event, Promoted)

    def state_of(self, host: str) -> str:
        """Return the state of a host for `paceline hosts`; "" if it stays."""
        one = self._under_way.get(host)
        return "" if one is None else f"leaving: {one.why}, {one.left_s:.0f} s left"

    def summary(self) -> list[str]:
        """Return a line about the hosts that have left; none if there were none."""
        if not self._done:
            return []
        hosts = ", ".join(f"{one.host}: {one.why}" for one in self._done[:4])
        more = ", ..." if len(self._done) > 4 else ""
        count = len(self._done)
        ends = f"{self._num_lost} processes lost before" if self._num_lost else "no step repeated"
        return [
            f"paceline: {count} planned leave{'s' if count > 1 else ''} ({hosts}{more}); {ends}"
        ]


def _members(job: ElasticJob, here: Iterable[RankProcess]) -> tuple[int, ...]:
    ranks = () if job.event_log.membership is None else job.event_log.membership.ranks
    return tuple(p.name.rank for p in here if p.name.rank in ranks)


def _announcement(departure: Departure) -> str:
    there = names(departure.ranks.values())
    text = f"host {departure.host} goes away in {departure.within_s:.0f} s ({departure.why})"
    if not there:
        return f"{text}; no process is there"
    verbs = "hands over and leaves" if len(departure.ranks) == 1 else "hand over and leave"
    return f"{text}: {there} {verbs}"
