"""A job on this host: start every rank, watch them, and end all of them together.

    start -> watch -> (a rank failed | interrupted | all finished) -> stop -> clean up -> report

The launcher is one asyncio loop on the main thread. In it run the coordinator, the readers of the
ranks' output and the signal handlers (SIGCHLD tells that a rank ended). The display has a thread of
its own, and there is the guard process for the case that the launcher itself is killed.

One rank that ends with code 0 while others run is no failure: it may simply have less to do. Every
process that a rank started and left behind ends with the job.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from paceline.cluster.coordinator import Coordinator
from paceline.cluster.secret_file import create_secret_file, load_secret
from paceline.config import EngineConfig, runtime_dir
from paceline.launch.board import Board
from paceline.launch.display import Display
from paceline.launch.environment import JobAddresses, worker_environ
from paceline.launch.guard import end_processes
from paceline.launch.jobdir import JobDirectory
from paceline.launch.lifeline import Guard, hold_port
from paceline.launch.lines import printable
from paceline.launch.machine import OomCount, memory, usable_cores
from paceline.launch.outcome import Outcome
from paceline.launch.output import RankOutput
from paceline.launch.process import RankProcess
from paceline.launch.report import RankResult, first_cause
from paceline.launch.screen import Picture
from paceline.launch.spec import RunSpec
from paceline.telemetry.events import Event, Note

# After SIGTERM; the whole end of a job must stay below 5 s.
STOP_GRACE_S = 3.0
# How long the cause of a consequence may take to exit: closing a large interpreter is slow.
CAUSE_GRACE_S = 3.0
# How long after its end a rank's pipes may stay open (something it started may hold them).
DRAIN_S = 0.5


class LocalJob:
    """Runs one job; `run` is called once, on the main thread."""

    def __init__(self, spec: RunSpec, environ: Mapping[str, str], display: Display) -> None:
        self._spec = spec
        self._environ = environ
        self._display = display
        self._job_id = secrets.token_hex(8)
        self._board = Board(spec.num_workers)
        self._ranks: list[RankProcess] = []
        self._outputs: list[RankOutput] = []
        self._told_to_stop: set[int] = set()
        self._frozen: set[int] = set()
        self._ended: list[int] = []  # ranks in the order of their end
        self._interrupts: list[signal.Signals] = []
        self._changed = asyncio.Event()

    async def run(self) -> Outcome:
        """Run the job to its end and return what became of it; raises LaunchError."""
        started_s, oom_before = time.monotonic(), OomCount.read()
        # A wrong setting is refused here, once, instead of by every rank.
        config = EngineConfig.from_environ({**self._environ, **self._spec.env})
        self._spec.pace_in(self._environ)
        with ExitStack() as held:
            directory = held.enter_context(JobDirectory(Path(runtime_dir(self._environ))))
            port = held.enter_context(hold_port())
            secret_file = create_secret_file(directory.path)
            coordinator = Coordinator(
                self._job_id,
                load_secret(secret_file),
                self._spec.num_workers,
                config.join_timeout_s,
                self._on_event,
                liveness_s=config.liveness_s,
            )
            where = JobAddresses(
                job_id=self._job_id,
                coordinator=await coordinator.start("127.0.0.1", 0),
                secret_file=str(secret_file),
                master_port=port.getsockname()[1],
            )
            guard = Guard(self._job_id, directory.path)
            try:
                await self._run_ranks(where, guard)
            finally:
                await self._clean_up(guard)
                await coordinator.stop()
                guard.end()
        return Outcome(
            results=[self._result(rank) for rank in range(len(self._ranks))],
            first=self._first_cause(),
            interrupted_by=self._interrupts[0] if self._interrupts else None,
            wall_s=time.monotonic() - started_s,
            oom_before=oom_before,
            oom_after=OomCount.read(),
            memory=memory(),
        )

    def picture(self) -> Picture | None:
        """Return the board for the screen, or None when no rank has reported anything."""
        if not self._board.has_progress:
            return None
        now_s = time.monotonic()
        return Picture(self._board.columns, self._board.rows(now_s), self._board.line(now_s))

    def set_state(self, rank: int, state: str) -> None:
        """Put the final word about a rank on the board."""
        self._board.set_state(rank, state)

    # -- start -------------------------------------------------------------------------------

    async def _run_ranks(self, where: JobAddresses, guard: Guard) -> None:
        self._handle_signals()
        cores, argv = usable_cores(), self._spec.argv()
        for rank in range(self._spec.num_workers):
            environ = worker_environ(self._environ, self._spec, rank, where, cores=cores)
            process = RankProcess(rank, argv, environ)
            self._ranks.append(process)
            guard.watch(process.pid)
            self._outputs.append(RankOutput(process, self._display))
        self._display.start()
        painter = asyncio.ensure_future(self._paint())
        try:
            await self._watch()
            await self._stop()
        finally:
            painter.cancel()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._on_child)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the user wants the job to outlive the terminal
            loop.add_signal_handler(number, self._on_interrupt, number)

    # -- watch -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Return when all ranks have ended, one has failed for a known cause, or on a signal."""
        while self._running() and not self._interrupts:
            if self._failures():
                await self._await_cause()
                return
            await self._next_change()

    async def _await_cause(self) -> None:
        """Give the cause time to appear when only consequences of it have been seen so far."""
        deadline_s = time.monotonic() + CAUSE_GRACE_S
        while self._running() and not self._interrupts and time.monotonic() < deadline_s:
            await self._drained(result.rank for result in self._failures())
            if not all(result.is_consequence for result in self._failures()):
                return
            await self._next_change(within_s=deadline_s - time.monotonic())

    async def _paint(self) -> None:
        while True:
            await asyncio.sleep(self._display.every_s)
            picture = self.picture()
            if picture is not None:
                self._display.progress(picture)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Note):
            self._display.rank_line(event.rank, True, printable(event.text[:1000].encode()))
        else:
            self._board.on_progress(event, time.monotonic())

    def _on_child(self) -> None:
        for process in self._ranks:
            if process.check_ended():
                self._ended.append(process.rank)
                success = process.status is not None and process.status.is_success
                self.set_state(process.rank, "finished" if success else str(process.status))
        self._changed.set()

    def _on_interrupt(self, number: signal.Signals) -> None:
        self._interrupts.append(number)
        self._changed.set()

    async def _next_change(self, *, within_s: float | None = None) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), within_s)
        self._changed.clear()

    # -- stop --------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Ask the ranks that still run to end; a further signal cuts the waiting short."""
        self._on_child()
        running = self._running()
        self._told_to_stop.update(process.rank for process in running)
        self._frozen.update(process.rank for process in running if process.is_frozen())
        for process in running:
            process.signal_group(signal.SIGTERM)
            process.signal_group(signal.SIGCONT)  # a frozen rank cannot hear SIGTERM
        heard, deadline_s = len(self._interrupts), time.monotonic() + STOP_GRACE_S
        while self._running() and len(self._interrupts) == heard:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                names = ", ".join(str(process.rank) for process in self._running())
                self._display.say(f"paceline: rank {names} did not end on SIGTERM: killing it")
                break
            await self._next_change(within_s=left_s)

    async def _clean_up(self, guard: Guard) -> None:
        """Leave nothing behind; runs also when starting failed half-way."""
        await self._drained(p.rank for p in self._ranks if not p.is_running)
        for process in self._ranks:
            process.signal_group(signal.SIGKILL)
        for pid in end_processes(self._job_id, guard.sessions, within_s=0.8):
            self._display.say(
                f"paceline: process {pid} is stuck in the kernel and could not be ended"
            )
        self._on_child()
        for output in self._outputs:
            output.close()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGCHLD, signal.SIGHUP):
            loop.remove_signal_handler(number)
        for process in self._ranks:
            process.presume_killed()
            process.release()

    # -- results -----------------------------------------------------------------------------

    def _running(self) -> list[RankProcess]:
        return [process for process in self._ranks if process.is_running]

    async def _drained(self, ranks: Iterable[int]) -> None:
        """Wait until the output of ended ranks is read, but not for ever."""
        waits = [asyncio.ensure_future(self._outputs[rank].done.wait()) for rank in ranks]
        if waits:
            _, late = await asyncio.wait(waits, timeout=DRAIN_S)
            for wait in late:
                wait.cancel()

    def _failures(self) -> list[RankResult]:
        """Return the ranks that failed by themselves, in the order of their end."""
        results = [self._result(rank) for rank in self._ended]
        return [result for result in results if result.has_failed]

    def _first_cause(self) -> RankResult | None:
        """Name the rank to blame: none, when the signal that ended us reached the ranks too."""
        first = first_cause(self._failures())
        if first is not None and self._interrupts and first.status.signal == self._interrupts[0]:
            return None
        return first

    def _result(self, rank: int) -> RankResult:
        process, output = self._ranks[rank], self._outputs[rank]
        assert process.status is not None and process.ended_s is not None
        return RankResult(
            rank=rank,
            pid=process.pid,
            status=process.status,
            ran_s=process.ended_s - process.started_s,
            was_stopped=rank in self._told_to_stop,
            was_frozen=rank in self._frozen,
            stderr_tail=tuple(output.stderr_tail),
            last_stdout=output.last_stdout,
        )
