"""The processes of a job on this host, by rank, and how each ended.

The table notices exits, sends signals and makes the results; it decides nothing. Two launchers use
it: Host (launcher/host.py), which runs scripts, and `pl.launch` (launcher/function/launch.py),
which runs a function.

If one rank fails, the other ranks fail too: they lose their peer, or the launcher stops them. A
report in order of arrival would bury the cause under its consequences. So each failure is one of
two: a CONSEQUENCE if the last exception of the rank says that a peer was lost or did not answer,
and otherwise a CAUSE.

Threads: used in one thread only.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.errors import names_of_peer_errors
from paceline.launcher.processes.guard import Sessions
from paceline.launcher.processes.guard_main import end_processes
from paceline.launcher.processes.process import ChildProcess, ExitStatus
from paceline.runtime.process_names import ProcessName

P = TypeVar("P", bound=ChildProcess)
_TRACEBACK = "Traceback (most recent call last):"
# torch.distributed prefixes each line with its rank; on a mesh with the rank in the unit.
_TORCH_RANK = re.compile(r"^\[rank\d+\]: ")
_CHAINED = ("During handling of the above", "The above exception was the direct cause")
# The last line of a traceback that reports a lost peer: Paceline's own errors, and gloo's.
# torch may wrap Paceline's, as in "RuntimeError: PeerLost: rank 2 ...".
_CONSEQUENCE = re.compile(
    rf"^(?:[\w.]+: .*)?(?:\w+\.)*\b(?:{'|'.join(names_of_peer_errors())})\b"
    r"|^[\w.]+: .*Connection (?:closed|reset) by peer"
)


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """How one process ended. `was_stopped`: the launcher had asked it to stop before that.

    `ended_last`: every worker had ended before it; then the exit of a server is no failure.
    """

    name: ProcessName
    pid: int
    status: ExitStatus
    ran_s: float
    was_stopped: bool = False
    ended_last: bool = False
    was_frozen: bool = False
    stderr_tail: Sequence[str] = ()
    last_stdout: str = ""
    host_name: str = ""  # of another host
    reason: str = ""  # of its exit, if its host reported one

    @property
    def has_failed(self) -> bool:
        is_good = self.status.is_success or self.status.is_preempted
        return not (is_good or self.was_stopped or self.ended_last)

    @property
    def last_exception(self) -> str:
        """The last line of the process's last traceback, or "" if there was none."""
        block = traceback_tail(self.stderr_tail)
        if not block or not block[0].startswith(_TRACEBACK):
            return ""
        unindented = [line for line in block if line and not line[0].isspace()]
        named = [line for line in unindented if not line.startswith((_TRACEBACK, *_CHAINED))]
        return named[-1] if named else ""

    @property
    def is_consequence(self) -> bool:
        """Whether the process died because another one was lost; a crash never counts as that."""
        block = traceback_tail(self.stderr_tail)
        is_traceback = bool(block) and block[0].startswith(_TRACEBACK)
        is_exception = is_traceback and self.status.signal is None
        return is_exception and any(_CONSEQUENCE.match(line) for line in block)


def first_cause(failures: Sequence[ProcessResult]) -> ProcessResult | None:
    """Return the first cause of failures in order of exit; else the first consequence."""
    causes = [result for result in failures if not result.is_consequence]
    return next(iter(causes or failures), None)


def traceback_tail(lines: Sequence[str]) -> list[str]:
    """Return the last traceback in stderr, with those it is chained to; all lines if none."""
    lines = [_TORCH_RANK.sub("", line) for line in lines]
    starts = [i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return list(lines)
    start = starts.pop()
    while starts and any(line.startswith(_CHAINED) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return list(lines[start:])


class ProcessTable(Generic[P]):
    """`on_end` is called once for each process that has ended."""

    def __init__(self, job_id: str, on_end: Callable[[P], None]) -> None:
        self._job_id, self._on_end = job_id, on_end
        self.guard = Sessions()
        self._processes: dict[int, P] = {}  # by rank
        self._asked_to_stop: set[int] = set()
        self._frozen: set[int] = set()
        self._excused: set[int] = set()
        self._ended: list[int] = []  # ranks in the order of their exit
        self._ended_last: set[int] = set()  # servers that ended after the last worker

    def add(self, process: P) -> None:
        """Add a process that was just started, and put its session under guard."""
        if process.session is not None:
            self.guard.watch(process.session)
        self._processes[process.name.rank] = process

    def remove(self, process: P) -> ProcessResult:
        """Remove one that has ended while the job continues; return how it ended."""
        rank = process.name.rank
        result = self._result(process)
        process.release()
        del self._processes[rank]
        self._ended.remove(rank)
        if process.session is not None:
            self.guard.forget(process.session)
        return result

    # -- watch -------------------------------------------------------------------------------

    def check(self) -> None:
        """Notice exits since the last call; workers first, as their exit excuses servers."""
        for process in sorted(self._processes.values(), key=lambda process: process.name.slot):
            if process.check_ended():
                self._ended.append(process.name.rank)
                if not process.name.is_worker and not self.workers:
                    self._ended_last.add(process.name.rank)
                self._on_end(process)

    def find(self, rank: int) -> P | None:
        return self._processes.get(rank)

    @property
    def pids(self) -> set[int]:
        """The pids of all processes on this host, also of ended ones that were not removed."""
        return {p.session for p in self._processes.values() if p.session is not None}

    @property
    def all(self) -> list[P]:
        """The processes that were not removed, also ended ones."""
        return list(self._processes.values())

    @property
    def workers(self) -> list[P]:
        """The workers that still run."""
        return [p for p in self._processes.values() if p.is_running and p.name.is_worker]

    @property
    def servers(self) -> list[P]:
        """The servers and data workers that still run."""
        return [p for p in self._processes.values() if p.is_running and not p.name.is_worker]

    @property
    def running(self) -> list[P]:
        return self.workers + self.servers

    @property
    def ended(self) -> list[P]:
        """The processes that have ended and were not removed, in order of exit."""
        return [self._processes[rank] for rank in self._ended]

    # -- stop --------------------------------------------------------------------------------

    def ask_to_stop(self, processes: Iterable[P]) -> None:
        """Send SIGTERM; how these processes end from now on is no failure."""
        for process in processes:
            self._asked_to_stop.add(process.name.rank)
            if process.is_frozen():
                self._frozen.add(process.name.rank)
            process.signal_group(signal.SIGTERM)
            process.signal_group(signal.SIGCONT)  # a frozen process cannot handle SIGTERM

    def kill_all(self, *, within_s: float = 2.0) -> list[int]:
        """Kill every process and everything they started; return the pids that are left."""
        for process in self._processes.values():
            process.signal_group(signal.SIGKILL)
        return end_processes(self._job_id, self.guard.sessions, within_s=within_s)

    def release(self) -> None:
        """Reap all processes; call once, at the end of the job."""
        for process in self._processes.values():
            process.release()

    # -- results -----------------------------------------------------------------------------

    def excuse(self, process: P) -> None:
        """Do not count the exit of a process as a failure: the job continues without it."""
        self._excused.add(process.name.rank)

    def blame(self, process: P) -> None:
        """Undo `excuse`."""
        self._excused.discard(process.name.rank)

    def has_traceback(self, process: P) -> bool:
        """Return whether the last thing that an ended process printed is an exception."""
        return bool(self._result(process).last_exception)

    def is_consequence(self, process: P) -> bool:
        """Return whether an ended process died because another one was lost."""
        return self._result(process).is_consequence

    def failures(self) -> list[ProcessResult]:
        """Return the processes that failed on their own, in order of exit."""
        blamed = [rank for rank in self._ended if rank not in self._excused]
        results = [self._result(self._processes[rank]) for rank in blamed]
        return [result for result in results if result.has_failed]

    def first_cause(self, interrupt: signal.Signals | None) -> ProcessResult | None:
        """Return the process to blame; none if it died of the signal that interrupted the job."""
        first = first_cause(self.failures())
        if first is not None and interrupt is not None and first.status.signal == interrupt:
            return None
        return first

    def results(self) -> list[ProcessResult]:
        """Return how each process ended, when all have."""
        processes = sorted(self._processes.values(), key=lambda process: process.name.slot)
        return [self._result(process) for process in processes]

    def _result(self, process: P) -> ProcessResult:
        rank = process.name.rank
        assert process.status is not None and process.ended_s is not None
        return ProcessResult(
            name=process.name,
            pid=process.pid,
            status=process.status,
            ran_s=process.ended_s - process.started_s,
            was_stopped=rank in self._asked_to_stop,
            ended_last=rank in self._ended_last,
            was_frozen=rank in self._frozen,
            stderr_tail=tuple(process.stderr_tail),
            last_stdout=process.last_stdout,
            host_name=process.host_name,
            reason=process.reason,
        )
