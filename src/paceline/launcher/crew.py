"""The crew: the processes of a job, by rank, and what became of each.

It notices ends, sends signals and makes the results; it decides nothing. Processes are started and
left without trace by their host (host.py).

Threads: used on the launcher's main thread only.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable

from paceline.launcher.display import Display
from paceline.launcher.outcome import RankResult, first_cause
from paceline.launcher.output import RankOutput
from paceline.launcher.process import RankProcess
from paceline.launcher.seat import Seat

# How long after its end a rank's pipes may stay open (something it started may hold them).
DRAIN_S = 0.5


class Crew:
    """All processes of one job; `on_end` is called once for each when it is seen to have ended."""

    def __init__(self, display: Display, on_end: Callable[[RankProcess], None]) -> None:
        self._display = display
        self._on_end = on_end
        self._processes: dict[int, RankProcess] = {}  # by rank
        self._outputs: dict[int, RankOutput] = {}
        self._told_to_stop: set[int] = set()
        self._frozen: set[int] = set()
        self._excused: set[int] = set()
        self._ended: list[int] = []  # ranks in the order of their end
        self._over: set[int] = set()  # those that served, and ended after the last worker

    def add(self, process: RankProcess) -> None:
        """Take in a process that was just started."""
        self._processes[process.seat.rank] = process
        self._outputs[process.seat.rank] = RankOutput(process, self._display)

    def remove(self, process: RankProcess) -> RankResult:
        """Let go of one that has ended while the job goes on; return what became of it."""
        rank = process.seat.rank
        self._outputs[rank].close()
        result = self._result(rank)
        process.release()
        del self._processes[rank], self._outputs[rank]
        self._ended.remove(rank)
        return result

    # -- watch -------------------------------------------------------------------------------

    def look(self) -> None:
        """See who has ended since the last look: workers first, as their end excuses servers'."""
        for process in sorted(self._processes.values(), key=lambda process: process.seat.place):
            if process.check_ended():
                self._ended.append(process.seat.rank)
                if not process.seat.is_worker and not self.workers:
                    self._over.add(process.seat.rank)
                self._on_end(process)

    def find(self, rank: int) -> RankProcess | None:
        return self._processes.get(rank)

    @property
    def pids(self) -> set[int]:
        """The pids of all, also of those that have ended and were not let go of."""
        return {process.pid for process in self._processes.values()}

    @property
    def workers(self) -> list[RankProcess]:
        """The workers that still run."""
        return [p for p in self._processes.values() if p.is_running and p.seat.is_worker]

    @property
    def servers(self) -> list[RankProcess]:
        """The servers and data workers that still run."""
        return [p for p in self._processes.values() if p.is_running and not p.seat.is_worker]

    @property
    def running(self) -> list[RankProcess]:
        return self.workers + self.servers

    async def drained(self, seats: Iterable[Seat] | None = None) -> None:
        """Wait until the output of ended processes (default: all) is read, but not for ever."""
        ended = [self._processes[rank].seat for rank in self._ended] if seats is None else seats
        waits = [asyncio.ensure_future(self._outputs[seat.rank].done.wait()) for seat in ended]
        if waits:
            _, late = await asyncio.wait(waits, timeout=DRAIN_S)
            for wait in late:
                wait.cancel()

    # -- stop --------------------------------------------------------------------------------

    def tell_to_stop(self, processes: Iterable[RankProcess]) -> None:
        """Ask them to end; what they do from now on is no failure of theirs."""
        for process in processes:
            self._told_to_stop.add(process.seat.rank)
            if process.is_frozen():
                self._frozen.add(process.seat.rank)
            process.signal_group(signal.SIGTERM)
            process.signal_group(signal.SIGCONT)  # a frozen rank cannot hear SIGTERM

    def kill(self) -> None:
        for process in self._processes.values():
            process.signal_group(signal.SIGKILL)

    def release(self) -> None:
        """Read what is left in the pipes and reap everybody; call once, at the end of the job."""
        for output in self._outputs.values():
            output.close()
        for process in self._processes.values():
            process.presume_killed()
            process.release()

    # -- results -----------------------------------------------------------------------------

    def excuse(self, process: RankProcess) -> None:
        """Do not count the end of a process as a failure: the job goes on without it."""
        self._excused.add(process.seat.rank)

    def blame(self, process: RankProcess) -> None:
        """Take an excuse back."""
        self._excused.discard(process.seat.rank)

    def has_traceback(self, process: RankProcess) -> bool:
        """Say whether the last that a process printed was an exception."""
        return bool(self._result(process.seat.rank).last_exception)

    def is_consequence(self, process: RankProcess) -> bool:
        """Say whether an ended process died of what happened to another one."""
        return self._result(process.seat.rank).is_consequence

    def failures(self) -> list[RankResult]:
        """Return those that failed by themselves, in the order of their end."""
        results = [self._result(rank) for rank in self._ended if rank not in self._excused]
        return [result for result in results if result.has_failed]

    def first_cause(self, interrupt: signal.Signals | None) -> RankResult | None:
        """Name the one to blame: none, when the signal that ended us reached the others too."""
        first = first_cause(self.failures())
        if first is not None and interrupt is not None and first.status.signal == interrupt:
            return None
        return first

    def results(self) -> list[RankResult]:
        """Return what became of everybody, when all have ended."""
        ranks = sorted(self._processes, key=lambda rank: self._processes[rank].seat.place)
        return [self._result(rank) for rank in ranks]

    def _result(self, rank: int) -> RankResult:
        process, output = self._processes[rank], self._outputs[rank]
        assert process.status is not None and process.ended_s is not None
        return RankResult(
            seat=process.seat,
            pid=process.pid,
            status=process.status,
            ran_s=process.ended_s - process.started_s,
            was_stopped=rank in self._told_to_stop,
            was_over=rank in self._over,
            was_frozen=rank in self._frozen,
            stderr_tail=tuple(output.stderr_tail),
            last_stdout=output.last_stdout,
        )
