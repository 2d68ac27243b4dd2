"""The crew: the processes of a job, by rank, and what became of each.

It notices ends, sends signals and makes the results; it decides nothing. Processes are started and
ended by their host (launcher/host.py), or by the team of a launched function
(launcher/function/launch.py).

Threads: used in one thread only.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from paceline.launcher.outcome import RankResult, first_cause
from paceline.launcher.processes.process import ChildProcess

P = TypeVar("P", bound=ChildProcess)


class Crew(Generic[P]):
    """All processes of one job; `on_end` is called once for each when it is seen to have ended."""

    def __init__(self, on_end: Callable[[P], None]) -> None:
        self._on_end = on_end
        self._processes: dict[int, P] = {}  # by rank
        self._told_to_stop: set[int] = set()
        self._frozen: set[int] = set()
        self._excused: set[int] = set()
        self._ended: list[int] = []  # ranks in the order of their end
        self._over: set[int] = set()  # those that served, and ended after the last worker

    def add(self, process: P) -> None:
        """Take in a process that was just started."""
        self._processes[process.seat.rank] = process

    def remove(self, process: P) -> RankResult:
        """Let go of one that has ended while the job goes on; return what became of it."""
        rank = process.seat.rank
        result = self._result(process)
        process.release()
        del self._processes[rank]
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

    def find(self, rank: int) -> P | None:
        return self._processes.get(rank)

    @property
    def pids(self) -> set[int]:
        """The pids of all, also of those that have ended and were not let go of."""
        return {process.pid for process in self._processes.values()}

    @property
    def workers(self) -> list[P]:
        """The workers that still run."""
        return [p for p in self._processes.values() if p.is_running and p.seat.is_worker]

    @property
    def servers(self) -> list[P]:
        """The servers and data workers that still run."""
        return [p for p in self._processes.values() if p.is_running and not p.seat.is_worker]

    @property
    def running(self) -> list[P]:
        return self.workers + self.servers

    @property
    def ended(self) -> list[P]:
        """Those that have ended and were not let go of, in that order."""
        return [self._processes[rank] for rank in self._ended]

    # -- stop --------------------------------------------------------------------------------

    def tell_to_stop(self, processes: Iterable[P]) -> None:
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
        """Reap everybody; call once, at the end of the job."""
        for process in self._processes.values():
            process.release()

    # -- results -----------------------------------------------------------------------------

    def excuse(self, process: P) -> None:
        """Do not count the end of a process as a failure: the job goes on without it."""
        self._excused.add(process.seat.rank)

    def blame(self, process: P) -> None:
        """Take an excuse back."""
        self._excused.discard(process.seat.rank)

    def has_traceback(self, process: P) -> bool:
        """Say whether the last that a process printed was an exception."""
        return bool(self._result(process).last_exception)

    def is_consequence(self, process: P) -> bool:
        """Say whether an ended process died of what happened to another one."""
        return self._result(process).is_consequence

    def failures(self) -> list[RankResult]:
        """Return those that failed by themselves, in the order of their end."""
        blamed = [rank for rank in self._ended if rank not in self._excused]
        results = [self._result(self._processes[rank]) for rank in blamed]
        return [result for result in results if result.has_failed]

    def first_cause(self, interrupt: signal.Signals | None) -> RankResult | None:
        """Name the one to blame: none, when the signal that ended us reached the others too."""
        first = first_cause(self.failures())
        if first is not None and interrupt is not None and first.status.signal == interrupt:
            return None
        return first

    def results(self) -> list[RankResult]:
        """Return what became of everybody, when all have ended."""
        processes = sorted(self._processes.values(), key=lambda process: process.seat.place)
        return [self._result(process) for process in processes]

    def _result(self, process: P) -> RankResult:
        rank = process.seat.rank
        assert process.status is not None and process.ended_s is not None
        return RankResult(
            seat=process.seat,
            pid=process.pid,
            status=process.status,
            ran_s=process.ended_s - process.started_s,
            was_stopped=rank in self._told_to_stop,
            was_over=rank in self._over,
            was_frozen=rank in self._frozen,
            stderr_tail=tuple(process.stderr_tail),
            last_stdout=process.last_stdout,
        )
