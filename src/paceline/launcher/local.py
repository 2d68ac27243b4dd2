"""A job on this host: start every process, watch them, and end all of them together.

    start -> watch -> (one failed | interrupted | workers finished) -> stop -> clean up -> report

The launcher is one asyncio loop on the main thread. In it run the coordinator, the readers of the
processes' output and the signal handlers (SIGCHLD tells that one ended). The display has a thread
of its own, and there is the guard process for the case that the launcher itself is killed.

One rank that ends with code 0 while others run is no failure: it may simply have less to do.

Servers serve until the last worker has left, and then end by themselves; those that do not are
stopped. So workers decide when the job is over. They are also stopped first: a worker that saves
its work on SIGTERM may have to ask the servers for it. A server that dies earlier ends the job.
Data workers are treated alike, but the job goes on without one that dies: others make its batches.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.transport.secret_file import load_secret
from paceline.launcher.elastic.job_facts import facts_of, new_job_id, write_facts
from paceline.launcher.environment import (
    SERVER_PATIENCE_S,
    JobAddresses,
    process_environ,
    template_environ,
)
from paceline.launcher.hang import HangWatch
from paceline.launcher.host import Host
from paceline.launcher.job_directory import JobDirectory
from paceline.launcher.job_resources import Foreground
from paceline.launcher.outcome import Outcome
from paceline.launcher.processes.process import RankProcess
from paceline.launcher.spec import SAVE_GRACE_S, RunSpec
from paceline.observe.display.board import Board, Picture
from paceline.observe.display.display import Display
from paceline.observe.display.lines import printable
from paceline.observe.record.trace_file import TraceFile
from paceline.observe.telemetry.event_file import Recorded
from paceline.observe.telemetry.events import Event, Note, Preemptible
from paceline.observe.telemetry.waiting import Waiting
from paceline.runtime.config import EngineConfig
from paceline.runtime.machine import OomCount, memory, usable_cores
from paceline.runtime.process_names import Seat, names

# How long the cause of a consequence may take to exit: closing a large interpreter is slow.
CAUSE_GRACE_S = 3.0
# How long servers may take to end after the last worker has.
SERVERS_GRACE_S = 2.0
# How long the last events of ended processes may take from their sockets to the board.
_LAST_EVENTS_S = 0.5
_LOOK_S = 0.5  # how often long waits are looked at


class LocalJob:
    """Runs one job; `run` is called once, on the main thread. See elastic/job.py for the other."""

    def __init__(
        self,
        spec: RunSpec,
        environ: Mapping[str, str],
        display: Display,
        job_id: str = "",
        holding: Foreground | None = None,
    ) -> None:
        self._spec = spec
        self._seats = {seat.rank: seat for seat in spec.seats}
        self._environ = environ
        self._display = display
        self._job_id = job_id or new_job_id()
        self._holding = holding or Foreground()
        self.on_up: Callable[[], None] = lambda: None  # called when all are started
        self._board = Board(spec.seats)
        events = (self._on_end, self._on_child)
        self._host = Host(spec, self._job_id, display, *events, say=self._say)
        self._crew = self._host.crew
        self._starting: asyncio.Future[None] | None = None
        steps = spec.trace_in(environ)
        self._trace = TraceFile(steps) if steps is not None else None
        self._interrupts: list[signal.Signals] = []
        self._saves_when_stopped = False  # some worker has said so
        self._changed = asyncio.Event()
        self._coordinator: Coordinator | None = None
        self._directory: JobDirectory
        self._secret_path: Path
        self._where: JobAddresses
        self._hangs: HangWatch

    async def run(self) -> Outcome:
        """Run the job to its end and return what became of it; raises LaunchError."""
        started_s, oom_before = time.monotonic(), OomCount.read()
        # A wrong setting is refused here, once, instead of by every rank.
        config = EngineConfig.from_environ({**self._environ, **self._spec.env})
        self._hangs = HangWatch(self._seats, self._crew.find, self._say, config.stacks_after_s)
        self._spec.pace_in(self._environ)
        self._spec.precision_in(self._environ)
        self._spec.mesh_in(self._environ)
        with ExitStack() as held:
            held.callback(self._host.close)
            cores = usable_cores()
            # First of all: it imports torch while we set up the rest.
            self._host.prepare(
                template_environ(self._environ, self._spec, self._job_id, cores=cores)
            )
            directory = self._holding.directory(self._environ, self._job_id)
            self._directory = held.enter_context(directory)
            self._secret_path = self._holding.secret_file(directory)
            master_port = self._holding.master_port(held)
            self._host.guard(self._holding.guard(self._job_id, directory))
            try:
                self._where = JobAddresses(
                    job_id=self._job_id,
                    coordinator=await self._open_control(load_secret(self._secret_path), config),
                    secret_file=str(self._secret_path),
                    master_port=master_port,
                )
                self._make_known()
                await self._run_processes()
            finally:
                await self._host.end_all()
                asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
                await self._close_control()
        return Outcome(
            results=self._crew.results(),
            first=self._crew.first_cause(self._stopped_by),
            interrupted_by=self._stopped_by,
            wall_s=time.monotonic() - started_s,
            oom_before=oom_before,
            oom_after=OomCount.read(),
            memory=memory(),
        )

    @property
    def _stopped_by(self) -> signal.Signals | None:
        return self._interrupts[0] if self._interrupts else None

    def picture(self) -> Picture | None:
        """Return the board for the screen, or None when nobody has reported anything."""
        if not self._board.has_progress:
            return None
        return self._board.picture(time.monotonic())

    @property
    def board(self) -> Board:
        """What every process last said, and what became of it."""
        return self._board

    def write_trace(self, directory: Path | None) -> str | None:
        """Write the trace that was asked for; return a line about it, None: nobody asked."""
        return None if self._trace is None else self._trace.write(directory, self._seats)

    def take_over_trace(self, before: LocalJob) -> None:
        """Keep what was traced before all were started again, unless it was traced again."""
        if self._trace is not None and before._trace is not None and not self._trace.has_spans:
            self._trace, self._seats = before._trace, {**before._seats, **self._seats}

    def was_lost_at_start(self, outcome: Outcome) -> bool:
        """Say whether the job may be started again from its beginning; only elastic ones are."""
        del outcome
        return False

    def may_start_again(self, outcome: Outcome) -> bool:
        """Say whether the job ended only because too many were lost; see --restarts."""
        del outcome
        return False

    def story(self) -> list[str]:
        """Return lines about what happened to the members of the job, for its end."""
        return []

    def set_state(self, seat: Seat, state: str) -> None:
        """Put the final word about a process on the board."""
        self._board.set_state(seat.rank, state)

    # -- start -------------------------------------------------------------------------------

    def _make_known(self) -> None:
        """Let commands of this user find the job."""
        facts = facts_of(self._spec, self._where)
        write_facts(self._directory.path, self._holding.facts(facts, self._spec, self._environ))

    async def _open_control(self, secret: bytes, config: EngineConfig) -> str:
        """Run the coordinator in this loop; return its address."""
        # Each process says how long it is ready to wait for the others; servers are for very long.
        join_timeout_s = SERVER_PATIENCE_S if self._spec.num_servers else config.join_timeout_s
        self._coordinator = Coordinator(
            self._job_id,
            secret,
            len(self._spec.seats),
            join_timeout_s,
            self._on_event,
            liveness_s=config.liveness_s,
        )
        return await self._coordinator.start("127.0.0.1", 0)

    async def _close_control(self) -> None:
        if self._coordinator is not None:
            await self._coordinator.wait_until_alone(_LAST_EVENTS_S)
            await self._coordinator.stop()

    async def _run_processes(self) -> None:
        self._handle_signals()
        self._starting = asyncio.ensure_future(self._start_all())
        with suppress(asyncio.CancelledError):  # interrupted while the template was importing
            await self._starting
        self.on_up()
        self._display.start()
        tasks = [asyncio.ensure_future(run()) for run in (self._paint, self._explain_hangs)]
        try:
            await self._watch()
            await self._stop()
        finally:
            for task in tasks:
                task.cancel()

    async def _start_all(self) -> None:
        for seat in self._spec.seats:
            await self._start(seat)
        if self._spec.elastic is None:
            self._host.expect_no_more()

    async def _start(self, seat: Seat) -> RankProcess:
        outlet = self._holding.outlet(self._spec, seat)
        return await self._host.start(seat, self.environ_of(seat), outlet)

    def environ_of(self, seat: Seat) -> dict[str, str]:
        """Return the complete environment of one process."""
        cores = usable_cores()
        return process_environ(self._environ, self._spec, seat, self._where, cores=cores)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the user wants the job to outlive the terminal
            loop.add_signal_handler(number, self._on_interrupt, number)

    # -- watch -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Return when the job is over: all workers ended, somebody failed, or on a signal."""
        while self._crew.workers and not self._interrupts:
            if self._crew.failures():
                await self._await_cause()
                return
            await self._next_change()
        if not self._crew.failures() and not self._interrupts:
            await self._await_servers()

    async def _await_servers(self) -> None:
        deadline_s = time.monotonic() + SERVERS_GRACE_S
        await self._await_end(lambda: self._crew.servers, deadline_s, heard=0)

    async def _await_cause(self) -> None:
        """Give the cause time to appear when only consequences of it have been seen so far."""
        deadline_s = time.monotonic() + CAUSE_GRACE_S
        while self._crew.running and not self._interrupts and time.monotonic() < deadline_s:
            await self._host.drained(result.seat for result in self._crew.failures())
            if not all(result.is_consequence for result in self._crew.failures()):
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
            await asyncio.sleep(min(_LOOK_S, self._hangs.after_s / 4))
            self._hangs.look(time.monotonic())

    def _say(self, text: str) -> None:
        self._display.say(f"paceline: {text}")

    def _on_event(self, event: Event) -> None:
        if self._trace is not None:
            self._trace.on_event(event)
        if isinstance(event, Recorded):
            self._display.record(event)
        self._board.on_event(event, time.monotonic())
        if isinstance(event, Preemptible):
            self._saves_when_stopped = True
        elif isinstance(event, Waiting):
            self._hangs.heard(event, time.monotonic())
        elif isinstance(event, Note) and event.rank in self._seats:
            self._on_note(self._seats[event.rank], printable(event.text[:1000].encode()))

    def _on_note(self, seat: Seat, text: str) -> None:
        self._display.output_line(seat, True, text)

    def _on_child(self) -> None:
        """Called when a process may have ended."""
        self._changed.set()

    def _on_end(self, process: RankProcess) -> None:
        status = process.status
        assert status is not None, "it has ended"
        word = "saved" if status.is_preempted else str(status)
        self.set_state(process.seat, "finished" if status.is_success else word)
        if process.seat.is_data_worker and self._crew.workers and not status.is_success:
            self._on_data_worker_lost(process)

    def _on_data_worker_lost(self, process: RankProcess) -> None:
        """Let the job go on: others make its batches. One that is lost before all have joined is
        missed by everybody, and ends the job as any rank does."""
        if self._coordinator is None or self._coordinator.membership is None:
            return
        self._crew.excuse(process)
        if self._interrupts or self._crew.failures():
            return
        left = sum(one.seat.is_data_worker for one in self._crew.servers)
        those = f"{left} of {sum(self._spec.data_workers)} data workers are left"
        self._display.say(f"paceline: {process.seat}: {process.status}; the job goes on, {those}")

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
        self, those: Callable[[], Sequence[RankProcess]], deadline_s: float, *, heard: int
    ) -> None:
        """Wait until `those` are none; a signal beyond the `heard` ones cuts the waiting short."""
        while those() and len(self._interrupts) == heard:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            await self._next_change(within_s=left_s)

    # -- stop --------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Ask those that still run to end: first the workers, then the servers."""
        self._host.look()
        crew, heard = self._crew, len(self._interrupts)
        deadline_s = time.monotonic() + self._grace_s
        crew.tell_to_stop(crew.workers)
        await self._await_end(lambda: crew.workers, deadline_s, heard=heard)
        crew.tell_to_stop(crew.servers)
        await self._await_end(lambda: crew.running, deadline_s, heard=heard)
        if crew.running and len(self._interrupts) == heard:
            left = names(process.seat for process in crew.running)
            self._display.say(f"paceline: {left} did not end on SIGTERM: killed now")

    @property
    def _grace_s(self) -> float:
        """How long those who were asked to end may take: longer, if they save first."""
        if not (self._saves_when_stopped and self._interrupts) or self._spec.grace_s > SAVE_GRACE_S:
            return self._spec.grace_s
        self._display.say(
            f"paceline: waits up to {SAVE_GRACE_S:.0f} s for the workers to save; once more ends"
            " them at once"
        )
        return SAVE_GRACE_S
