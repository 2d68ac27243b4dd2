"""An elastic job on this host: it continues while processes are lost, replaced, added and removed.

The coordinator, a process of its own, decides which processes are in the job. The launcher reports
to it how processes ended and whether they are stopped (a few times per second), starts the
newcomers that it wants, and kills the processes that it evicts. loss_policy.py has what the exit of
a process means.

A detached job outlives its supervisor, the process that runs this code in the background. Its
processes write to files, its directory stays, and the registry has what another supervisor needs.
If the supervisor is killed, the job continues without replacements until `paceline attach` starts
another one. That one starts the coordinator again, at the same address and from its journal, and
adopts the running processes. It cannot read their exit status.

Threads: everything runs in the launcher's loop on the main thread, as in launcher/job.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.control import messages as m
from paceline.control.messages import LossKind, Remark, Unwanted, Wanted
from paceline.control.operator_messages import Happened, HostsWanted, Notification
from paceline.control.transport.auth import load_secret
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.elastic.coordinator_process import CoordinatorProcess, policy_of
from paceline.launcher.elastic.departures import HostDepartures
from paceline.launcher.elastic.event_log import EventLog, hottest, stamped
from paceline.launcher.elastic.guests import await_guests
from paceline.launcher.elastic.host_requests import answer
from paceline.launcher.elastic.loss_policy import LossPolicy
from paceline.launcher.elastic.replacements import Newcomers, Slot
from paceline.launcher.elastic.silences import Silences
from paceline.launcher.elastic.supply import HostSupply
from paceline.launcher.elastic.task_set import TaskSet
from paceline.launcher.environment import SERVER_PATIENCE_S
from paceline.launcher.hosts.reach import is_this_host
from paceline.launcher.job import LocalJob
from paceline.launcher.job_registry import FoundJob, ProcessRecord, record_process
from paceline.launcher.job_size import ElasticPlan
from paceline.launcher.outcome import JobOutcome
from paceline.launcher.preemption.notice import Notice
from paceline.launcher.processes.monitor import ProcessMonitor
from paceline.launcher.processes.process import UNKNOWN, AdoptedProcess, RankProcess
from paceline.launcher.spec import RunSpec
from paceline.observe.display.display import Display
from paceline.observe.display.lines import printable
from paceline.observe.telemetry.events import Event, MembershipEvent, ProgressReport, Resumed
from paceline.runtime import coordinator_main
from paceline.runtime.config import EngineConfig, bind_address
from paceline.runtime.process_names import ProcessName

_POLL_S = 0.25
_SETTLE_S = 1.0  # for tasks that are under way when the job is over


class ElasticJob(LocalJob):
    """Runs one elastic job; `run` is called once, on the main thread."""

    def __init__(
        self,
        spec: RunSpec,
        environ: Mapping[str, str],
        display: Display,
        job_id: str = "",
        adopted: FoundJob | None = None,
    ) -> None:
        super().__init__(spec, environ, display, job_id, adopted)
        assert spec.elastic is not None
        mesh = spec.mesh_in(environ)
        self.plan: ElasticPlan = spec.elastic
        self.unit_size = mesh.unit_size if mesh is not None else 1
        self.hosts, self.processes, self.resources = self._hosts, self._processes, self._resources
        self.control = CoordinatorProcess(self._job_id, self._on_news, self.log, self.hosts.here)
        self.hosts.here.other_children = lambda: {self.control.pid}
        self.newcomers = Newcomers(self._reserve, self._start_newcomer, self.unit_size)
        self.monitor = ProcessMonitor()
        self.silences = Silences(self)
        self.event_log = EventLog(self.plan, self.unit_size)
        self.departures = HostDepartures(self)
        self._policy = LossPolicy(self)
        self._started: set[int] = set()  # ranks of all processes of this launcher
        self._ended_unwatched: list[int] = []  # ranks that ended while there was no supervisor
        self._is_adopted = adopted is not None
        self._tasks = TaskSet(self._on_task_done)
        self._polling: asyncio.Task[None] | None = None
        self._supply: HostSupply | None = None
        self.is_ending = False
        self._over = ""

    async def run(self) -> JobOutcome:
        outcome = await super().run()
        first = outcome.first  # a process that died of the end of the job is not its cause
        if self._over and first is not None and first.is_consequence:
            first = None
        return replace(outcome, first=first, over=self._over, lost=tuple(self._policy.losses))

    def was_lost_at_start(self, outcome: JobOutcome) -> bool:
        return not self._board.has_progress and outcome.was_lost_at_start

    def may_start_again(self, outcome: JobOutcome) -> bool:
        return not self._is_adopted and outcome.was_lost_with_too_many

    def history_lines(self) -> list[str]:
        servers = hottest(self.monitor.busy_servers())
        return [*self.event_log.summary(), *self.departures.summary(), *servers]

    @property
    def is_decided(self) -> bool:
        """Whether it is clear what follows from the loss of the last worker."""
        return bool(self._over or self.processes.workers or self.is_ending)

    def was_member(self, rank: int) -> bool:
        return rank in self.event_log.members

    def end_job(self, why: str) -> None:
        if not self.is_ending:  # else this follows from the end of the job
            self._over = self._over or why
            self._changed.set()

    # -- start -------------------------------------------------------------------------------

    async def _open_control(self, config: EngineConfig) -> str:
        # A worker may join from another host (`paceline join`) if PACELINE_BIND allows it.
        host = bind_address({**self._environ, **self._spec.env})
        if self.hosts.has_others:
            host = self.hosts.address
        has_servers = bool(self._spec.num_servers)
        arguments = coordinator_main.arguments(
            job_id=self._job_id,
            secret_file=str(self._resources.secret_file),
            journal=str(self._resources.directory / "journal"),
            policy=policy_of(self._spec, self.plan, config, self._spec.mesh_in(self._environ)),
            join_timeout_s=SERVER_PATIENCE_S if has_servers else config.join_timeout_s,
        )
        return self.control.start(host, self.resources.coordinator_port, arguments, self._environ)

    async def _close_control(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
        if self._supply is not None:
            self._supply.close()
        self.hosts.expect_no_more()
        await self.control.close()

    async def _start_all(self) -> None:
        records = self._resources.adopted_processes()
        if records is None:
            await super()._start_all()
        else:
            self._adopt(records)

    def _adopt(self, records: Sequence[ProcessRecord]) -> None:
        """Take over the processes of a former supervisor."""
        for one in records:
            output = self._resources.output(one.name)
            try:
                process = one.is_alive and AdoptedProcess(one.name, one.pid, output)
            except ProcessLookupError:
                process = False
            if not process:
                output.close()
                self._ended_unwatched.append(one.rank)
                continue
            output.close_child_ends()
            self.hosts.here.add(process)
            self._board.add(one.name)
            self._on_started(process)

    async def _start(self, name: ProcessName) -> RankProcess:
        process = await super()._start(name)
        self._on_started(process)
        return process

    def _on_started(self, process: RankProcess) -> None:
        if process.session is not None:  # another supervisor can only adopt those of this machine
            record_process(self._resources.directory, process.name, process.pid)
        self._started.add(process.name.rank)
        self._process_names[process.name.rank] = process.name
        self.monitor.add(process, self.hosts.signs(process))

    async def _attach(self) -> None:
        """Subscribe to the coordinator; one that was restarted may know members already."""
        status = await self.control.attach(load_secret(self._resources.secret_file))
        if status.membership is not None:
            self._on_changed(m.Changed(status.membership))
            for wanted in status.wanted:
                self.on_wanted(wanted)
        for rank in self._ended_unwatched:
            if self.was_member(rank):
                self.control.report_end(rank, "it ended without a supervisor", LossKind.ENDED)
        if self.hosts.supply is not None:
            self._supply = HostSupply(self, self.hosts.supply)
            self.hosts.supply.on_notice = self.on_notice

    def on_notice(self, host: str, notice: Notice) -> None:
        is_own = is_this_host(host)  # a node of Ray has an agent, also that of the launcher
        self._on_own_notice(notice) if is_own else self.departures.on_notice(host, notice)

    def ask_for_room(self, workers: int, servers: int) -> None:
        """Ask the engine for room for the replacements of processes that still run."""
        if self._supply is not None:
            self._supply.ask_for_more(workers, servers)

    # -- newcomers ---------------------------------------------------------------------------

    def on_wanted(self, wanted: Wanted) -> None:
        slot = (int(wanted.role == "server"), wanted.number)
        name = ProcessName(-1, wanted.number, wanted.role == "server", is_newcomer=True)
        if self._supply is not None and not self._supply.has_room(name):
            return
        if name.is_worker and self.plan.on_loss == "shrink" and not self.hosts.has_room(name):
            self.log(f"no host has a free slot for worker {wanted.number} now")
            return
        if self.newcomers.may_fill(slot):
            self.start_task(self._fill(slot))

    async def _fill(self, slot: Slot) -> None:
        try:
            await self.newcomers.fill(slot)
        except LaunchError as error:
            self._policy.on_failed_start(ProcessName(-1, slot[1], bool(slot[0])), str(error))

    async def _reserve(self, slot: Slot) -> int:
        return (await self.control.reserve("server" if slot[0] else "worker", slot[1])).rank

    async def _start_newcomer(self, name: ProcessName) -> None:
        await self._policy.await_exit(name.slot)
        if self.processes.failures():
            return
        try:
            process = await self._start(name)
        except LaunchError as error:
            self._policy.on_failed_start(name, str(error))
            return
        self._board.add(name)
        self._board.set_state(name.rank, "starting")
        if self.is_ending:  # it missed the SIGTERM that the other processes got
            self.processes.ask_to_stop([process])

    # -- watch -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        self._polling = asyncio.ensure_future(self._poll())
        self.start_task(self._attach())
        try:
            while not self._is_over():
                await self._next_change()
            if self.processes.failures():
                await self._await_cause()
            elif self._over:
                await self._policy.await_lost()
        finally:
            self.is_ending = self.newcomers.is_closed = True
            await self._tasks.finish(_SETTLE_S)
        if not self._over and not self.processes.failures() and not self._interrupts:
            guests = [self.event_log.members[rank] for rank in self._policy.left - self._started]
            await await_guests(guests, lambda: bool(self._interrupts), self.log)
            await self._await_servers()

    def _is_over(self) -> bool:
        """Return whether the job failed, was interrupted, or all workers have finished."""
        if self._interrupts or self._over or self.processes.failures():
            return True
        return not self.processes.workers and not self._tasks.is_busy and not self._guests()

    def _guests(self) -> set[int]:
        """Return the workers in the job that `paceline join` started."""
        membership = self.event_log.membership
        workers = membership.workers if membership is not None else ()
        return set(workers) - self._started - self._policy.left - self.event_log.lost_ranks

    async def _poll(self) -> None:
        """Check every process a few times per second, and report to the coordinator."""
        while True:
            self.hosts.check()
            now_s = time.monotonic()
            for rank, stopped_s in self.monitor.poll(self.processes.running, now_s).items():
                self.control.report_seen(rank, stopped_s)
            if not self.is_ending:
                self.silences.report_stuck(now_s)
                self._policy.kill_overdue(now_s)
            await asyncio.sleep(_POLL_S)

    def _on_change(self) -> None:
        super()._on_change()
        try:
            if not self.is_ending:
                self.control.check()
        except LaunchError as error:
            self.end_job(str(error))

    def on_end(self, process: RankProcess) -> None:
        if process.status != UNKNOWN:
            super().on_end(process)
        self._policy.on_end(process)

    # -- tasks and lines ---------------------------------------------------------------------

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.start(work)

    def _on_task_done(self, error: BaseException | None) -> None:
        self._changed.set()
        if isinstance(error, PacelineError):
            self.log(str(error))

    def log(self, text: str) -> None:
        """Print a line with the time of day."""
        self.show(stamped(text))

    def log_loss(self, rank: int, why: str, kind: LossKind) -> None:
        """Print that a member is lost, once."""
        self.silences.end(rank)
        line = self.event_log.lost(rank, why, kind, time.monotonic())
        if line is not None:
            self.show(line)

    def show(self, line: str) -> None:
        """Print a line as it is."""
        self._display.say(printable(line.encode()))

    # -- events and news -----------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        super()._on_event(event)
        if isinstance(event, ProgressReport) and self.was_member(event.rank):
            if not self.event_log.step:
                self.start_task(self.hosts.here.prepare_newcomers())
            self.event_log.progressed(event.step, time.monotonic())
        elif isinstance(event, Resumed):
            self.show(self.event_log.resumed(event))

    def _on_note(self, name: ProcessName, text: str) -> None:
        prefix = f"{name.role} {name.number}: "
        self.log(prefix + text.removeprefix(prefix))

    def _on_news(self, news: Notification) -> None:
        """Handle a message of the coordinator."""
        if isinstance(news, m.Changed):
            self._on_changed(news)
        elif isinstance(news, m.Presence):
            self._on_presence(news)
        elif isinstance(news, Happened):
            self._on_happened(news.event)
        elif isinstance(news, m.Over):
            self.end_job(news.why)
        elif isinstance(news, Wanted):
            self.on_wanted(news)
        elif isinstance(news, Unwanted) and self.was_member(news.rank):
            self._on_unwanted(news.rank)
        elif isinstance(news, Remark):
            self.log(news.text)
        elif isinstance(news, HostsWanted):
            self.start_task(answer(self, news))
        self._changed.set()

    def _on_unwanted(self, rank: int) -> None:
        self._policy.on_dismissed(rank)
        if self.departures.is_leaving(rank):
            return
        self.log(f"{self.event_log.name(rank)} is no longer wanted, and leaves")
        if self._supply is not None:
            self.start_task(self._supply.give_back())

    def _on_happened(self, event: Event | MembershipEvent) -> None:
        if isinstance(event, Event):
            self._on_event(event)
            return
        self._display.record(event)
        if self.departures.absorbs(event):
            return
        if (line := self.event_log.happened(event)) is not None:
            self.show(line)

    def _on_changed(self, news: m.Changed) -> None:
        before = self.event_log.membership
        self.event_log.take(news.membership)
        for member in news.membership.members:
            name = ProcessName(member.rank, member.number, member.role == "server", True)
            self._process_names.setdefault(member.rank, name)
        if before is None:
            return
        for loss in news.lost:
            self._policy.on_lost(loss.rank, loss.why, loss.kind)
        for rank in news.joined:
            self.newcomers.on_joined(self._process_names[rank].slot)
            self._board.add(self._process_names[rank])
            self.show(self.event_log.joined(rank, time.monotonic()))

    def _on_presence(self, news: m.Presence) -> None:
        was_member = self.was_member(news.rank)
        is_ours = was_member or self.processes.find(news.rank) is not None  # perhaps a newcomer
        if news.state == "lost" and is_ours:
            self._policy.evict(news.rank, news.detail, news.kind or LossKind.ENDED)
        elif was_member and news.state == "left":
            self._policy.on_left(news.rank, news.detail, news.kind)
        elif was_member:
            self.silences.on_presence(news)
