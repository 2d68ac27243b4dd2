"""A job: starts every process, watches them, and ends all of them together.

    start -> watch -> (one failed | interrupted | workers finished) -> stop -> clean up -> report

The launcher is one asyncio loop on the main thread. It runs the coordinator, the readers of the
processes' output and the signal handlers (SIGCHLD: a process may have ended). The display has its
own thread, and a guard process acts if the launcher itself is killed.

The first process that fails ends the job. elastic/job.py has the other policy: there the job
continues when a process is lost. If one rank exits with code 0 while others run, that is no
failure: it may simply have less to do.

Workers decide when the job is over. Servers serve until the last worker has left, and then exit by
themselves; the launcher stops those that do not. It stops workers first, because a worker that
saves on SIGTERM may have to read from the servers. A server that dies earlier ends the job. If a
data worker dies, the job continues: other data workers make its batches.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.transport.auth import load_secret
from paceline.launcher.environment import SERVER_PATIENCE_S, JobAddresses
from paceline.launcher.hang import HangWatch
from paceline.launcher.hosts.job_hosts import JobHosts
from paceline.launcher.job_registry import FoundJob, new_job_id
from paceline.launcher.job_resources import JobResources
from paceline.launcher.outcome import JobOutcome
from paceline.launcher.preemption.notice import Notice
from paceline.launcher.preemption.poller import NoticePoller
from paceline.launcher.processes.process import RankProcess
from paceline.launcher.spec import SAVE_GRACE_S, RunSpec
from paceline.observe.display.board import Board, BoardSnapshot
from paceline.observe.display.display import Display
from paceline.observe.display.lines import printable
from paceline.observe.record.trace_file import TraceFile
from paceline.observe.telemetry.events import Event, Note, Preemptible, Recorded
from paceline.observe.telemetry.wait_reports import WaitReport
from paceline.runtime.config import EngineConfig
from paceline.runtime.console import say
from paceline.runtime.machine import OomCount, memory
from paceline.runtime.process_names import ProcessName, names

# How long the cause of a consequence may take to exit: closing a large interpreter is slow.
CAUSE_GRACE_S = 3.0
# How long servers may take to exit after the last worker.
SERVERS_GRACE_S = 2.0
# How long the last events of ended processes may take from their sockets to the board.
_LAST_EVENTS_S = 0.5
_HANG_CHECK_S = 0.5


class LocalJob:
    """Runs one job; `run` is called once, on the main thread. ElasticJob is its subclass."""

    def __init__(
        self,
        spec: RunSpec,
        environ: Mapping[str, str],
        display: Display,
        job_id: str = "",
        adopted: FoundJob | None = None,
    ) -> None:
        self._spec = spec
        self._process_names = {name.rank: name for name in spec.process_names}
        self._environ = environ
        self._display = display
        self._job_id = job_id or new_job_id()
        self._resources = JobResources(spec, environ, self._job_id, adopted)
        self.on_started: Callable[[], None] = lambda: None  # called when all are started
        self._board = Board(spec.process_names)
        callbacks = (self.on_end, self._on_change)
        self._hosts = JobHosts(spec, environ, self._job_id, display, *callbacks, log=say)
        self._hosts.on_interrupt = lambda: self._on_interrupt(signal.SIGTERM)
        self._hosts.on_notice = self.on_notice
        self._processes = self._hosts.processes
        self._starting: asyncio.Future[None] | None = None
        steps = spec.trace_in(environ)
        self._trace = TraceFile(steps) if steps is not None else None
        self._interrupts: list[signal.Signals] = []
        self._saves_when_stopped = False  # a worker has announced that
        self._changed = asyncio.Event()
        self._coordinator: Coordinator | None = None
        self._where: JobAddresses
        self._hangs: HangWatch

    async def run(self) -> JobOutcome:
        """Run the job to its end and return how it ended; raises LaunchError."""
        started_s, oom_before = time.monotonic(), OomCount.read()
        spec, environ = self._spec, self._environ
        # A wrong setting fails here, once, instead of in every rank.
        config = EngineConfig.from_environ({**environ, **spec.env})
        spec.pace_in(environ)
        spec.precision_in(environ)
        spec.mesh_in(environ)
        links = spec.emulated_links_in(environ)
        if links is not None:
            say(links.text)
        find = self._processes.find
        self._hangs = HangWatch(self._process_names, find, say, config.stacks_after_s)
        with ExitStack() as held:
            held.callback(self._hosts.close)
            # First of all: the template imports torch while the launcher sets up the rest.
            self._hosts.start_template()
            self._resources.open(held)
            self._hosts.watch(self._resources.guard)
            try:
                secret = load_secret(self._resources.secret_file)
                await self._hosts.connect(secret, self._resources.directory)
                self._where = self._resources.publish(await self._open_control(config))
                self._hosts.publish(self._resources.facts)
                await self._run_processes()
            finally:
                await self._hosts.end_all()
                asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
                await self._close_control()
        return JobOutcome(
            results=self._processes.results(),
            first=self._processes.first_cause(self._stopped_by),
            interrupted_by=self._stopped_by,
            wall_s=time.monotonic() - started_s,
            oom_before=oom_before,
            oom_after=OomCount.read(),
            memory=memory(),
        )

    @property
    def _stopped_by(self) -> signal.Signals | None:
        return self._interrupts[0] if self._interrupts else None

    def picture(self) -> BoardSnapshot | None:
        """Return the board for the screen, or None if no process has reported progress."""
        if not self._board.has_progress:
            return None
        return self._board.snapshot(time.monotonic())

    @property
    def spec(self) -> RunSpec:
        return self._spec

    @property
    def board(self) -> Board:
        """What every process reported last, and how it ended."""
        return self._board

    def write_trace(self, directory: Path | None) -> str | None:
        """Write the trace if one was requested; return a line about it, else None."""
        return None if self._trace is None else self._trace.write(directory, self._process_names)

    def take_over_trace(self, before: LocalJob) -> None:
        """After a restart: keep what was traced before it, unless it was traced again."""
        if self._trace is not None and before._trace is not None and not self._trace.has_spans:
            self._trace = before._trace
            self._process_names = {**before._process_names, **self._process_names}

    def was_lost_at_start(self, outcome: JobOutcome) -> bool:
        """Return whether to start the job again from its beginning; only for elastic jobs."""
        del outcome
        return False

    def may_start_again(self, outcome: JobOutcome) -> bool:
        """Return whether the job ended only because it lost too many workers; see --restarts."""
        del outcome
        return False

    def history_lines(self) -> list[str]:
        """Return lines about lost, replaced and added processes, for the end of the job."""
        return []

    def set_state(self, name: ProcessName, state: str) -> None:
        """Put the final state of a process on the board."""
        self._board.set_state(name.rank, state)

    # -- start -------------------------------------------------------------------------------

    async def _open_control(self, config: EngineConfig) -> str:
        """Run the coordinator in this loop; return its address."""
        # Each process announces how long it will wait for the others; servers wait very long.
        join_timeout_s = SERVER_PATIENCE_S if self._spec.num_servers else config.join_timeout_s
        self._coordinator = Coordinator(
            self._job_id,
            load_secret(self._resources.secret_file),
            len(self._spec.process_names),
            join_timeout_s,
            self._on_event,
            liveness_s=config.liveness_s,
        )
        return await self._coordinator.start(self._hosts.address, 0)

    async def _close_control(self) -> None:
        if self._coordinator is not None:
            await self._coordinator.wait_until_alone(_LAST_EVENTS_S)
            await self._coordinator.stop()

    async def _run_processes(self) -> None:
        self._handle_signals()
        self._starting = asyncio.ensure_future(self._start_all())
        with suppress(asyncio.CancelledError):  # interrupted while the template was importing
            await self._starting
        self.on_started()
        self._display.start()
        tasks = [asyncio.ensure_future(run()) for run in (self._paint, self._explain_hangs)]
        if self.spec.notice_source is not None:
            poller = NoticePoller(self.spec.notice_source, self._on_own_notice, say)
            tasks.append(asyncio.ensure_future(poller.watch()))
        try:
            await self._watch()
            await self._stop()
        finally:
            for task in tasks:
                task.cancel()

    async def _start_all(self) -> None:
        for name in self._spec.process_names:
            await self._start(name)
        if self._spec.elastic is None:
            self._hosts.expect_no_more()

    async def _start(self, name: ProcessName) -> RankProcess:
        return await self._hosts.start(name, self._where, lambda: self._resources.output(name))

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the job is to outlive the terminal
            loop.add_signal_handler(number, self._on_interrupt, number)

    # -- watch -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Return when the job is over: all workers ended, a process failed, or on a signal."""
        while self._processes.workers and not self._interrupts:
            if self._processes.failures():
                await self._await_cause()
                return
            await self._next_change()
        if not self._processes.failures() and not self._interrupts:
            await self._await_servers()

    async def _await_servers(self) -> None:
        deadline_s = time.monotonic() + SERVERS_GRACE_S
        await self._await_end(lambda: self._processes.servers, deadline_s, interrupts=0)

    async def _await_cause(self) -> None:
        """Wait for the cause to exit while all known failures are consequences."""
        deadline_s = time.monotonic() + CAUSE_GRACE_S
        while self._processes.running and not self._interrupts and time.monotonic() < deadline_s:
            await self._hosts.drain_output(result.name for result in self._processes.failures())
            if not all(result.is_consequence for result in self._processes.failures()):
                return
            await self._next_change(within_s=deadline_s - time.monotonic())

    async def _paint(self) -> None:
        while True:
            await asyncio.sleep(self._display.every_s)
            picture = self.picture()
            if picture is not None:
                self._display.progress(picture)

    async def _explain_hangs(self) -> None:
        while True:
            await asyncio.sleep(min(_HANG_CHECK_S, self._hangs.after_s / 4))
            self._hangs.check(time.monotonic())

    def _on_event(self, event: Event) -> None:
        if self._trace is not None:
            self._trace.on_event(event)
        if isinstance(event, Recorded):
            self._display.record(event)
        self._board.on_event(event, time.monotonic())
        if isinstance(event, Preemptible):
            self._saves_when_stopped = True
        elif isinstance(event, WaitReport):
            self._hangs.on_event(event, time.monotonic())
        elif isinstance(event, Note) and event.rank in self._process_names:
            text = printable(event.text[:1000].encode())
            self._on_note(self._process_names[event.rank], text)

    def _on_note(self, name: ProcessName, text: str) -> None:
        self._display.output_line(name, True, text)

    def _on_change(self) -> None:
        """Called when a process may have ended."""
        self._changed.set()

    def on_end(self, process: RankProcess) -> None:
        """Handle the exit of a process."""
        status = process.status
        assert status is not None, "it has ended"
        word = "saved" if status.is_preempted else str(status)
        self.set_state(process.name, "finished" if status.is_success else word)
        if process.name.is_data_worker and self._processes.workers and not status.is_success:
            self._on_data_worker_lost(process)

    def _on_data_worker_lost(self, process: RankProcess) -> None:
        """Let the job continue: other data workers make its batches. If one is lost before all
        have joined, the others would wait for it; then it ends the job as any rank does."""
        if self._coordinator is None or self._coordinator.membership is None:
            return
        self._processes.excuse(process)
        if self._interrupts or self._processes.failures():
            return
        left = sum(one.name.is_data_worker for one in self._processes.servers)
        total = sum(self._spec.data_workers)
        say(
            f"{process.name}: {process.status}; the job continues with {left} of {total} data"
            " workers"
        )

    def on_notice(self, host: str, notice: Notice) -> None:
        """Handle a notice that a host goes away: this job cannot continue without any of them."""
        if not notice.is_withdrawn:
            self._stop_after_notice(f"host {host}", notice)

    def _stop_after_notice(self, who: str, notice: Notice) -> None:
        in_s = "" if notice.within_s is None else f" in {notice.within_s:.0f} s"
        say(f"{who} goes away{in_s} ({notice.why}): the job saves and stops")
        self.save_and_stop()

    def _on_own_notice(self, notice: Notice) -> None:
        """Stop: the job ends with the launcher's machine."""
        if not notice.is_withdrawn and not self._interrupts:
            self._stop_after_notice("the launcher's machine", notice)

    def save_and_stop(self) -> None:
        """Stop the job, as the first SIGTERM to the launcher does; a second one would not wait."""
        if not self._interrupts:
            self._on_interrupt(signal.SIGTERM)

    def _on_interrupt(self, number: signal.Signals) -> None:
        self._interrupts.append(number)
        if self._starting is not None:
            self._starting.cancel()
        self._changed.set()

    async def _next_change(self, *, within_s: float | None = None) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), within_s)
        self._changed.clear()

    async def _await_end(
        self, those: Callable[[], Sequence[RankProcess]], deadline_s: float, *, interrupts: int
    ) -> None:
        """Wait until `those` is empty; a signal after the first `interrupts` ends the wait."""
        while those() and len(self._interrupts) == interrupts:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            await self._next_change(within_s=left_s)

    # -- stop --------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Ask the running processes to exit: first the workers, then the servers."""
        self._hosts.check()
        table, interrupts = self._processes, len(self._interrupts)
        deadline_s = time.monotonic() + self._grace_s()
        table.ask_to_stop(table.workers)
        await self._await_end(lambda: table.workers, deadline_s, interrupts=interrupts)
        table.ask_to_stop(table.servers)
        await self._await_end(lambda: table.running, deadline_s, interrupts=interrupts)
        if table.running and len(self._interrupts) == interrupts:
            left = names(process.name for process in table.running)
            say(f"{left} did not end on SIGTERM: killed now")

    def _grace_s(self) -> float:
        """Return how long processes may take to exit: longer if they save first."""
        if not (self._saves_when_stopped and self._interrupts) or self._spec.grace_s > SAVE_GRACE_S:
            return self._spec.grace_s
        say(
            f"waiting up to {SAVE_GRACE_S:.0f} s for the workers to save; interrupt again to end"
            " them at once"
        )
        return SAVE_GRACE_S
