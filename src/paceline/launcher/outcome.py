"""The end of a job: what became of its processes, its exit code, and what the user is told.

When one rank fails, the others fail too: they lose their peer, or the launcher stops them. A report
that lists them in order of arrival buries the cause under its consequences. So each failure is
classed: a CONSEQUENCE is a rank whose last exception says that a peer was lost or did not answer;
everything else is a CAUSE. The first cause is named with its traceback, the others get a line.

A script that reports no progress and succeeds gets no words at all: `paceline run` then looks like
the script itself. Otherwise the closing summary comes first and the failure report last, because
the end of the output is what people read and paste.

Pure functions over values: the launcher collects `RankResult`s, tests make them by hand.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import names_of_peer_errors
from paceline.launcher.processes.process import ExitStatus
from paceline.runtime.formatting import memory_size
from paceline.runtime.machine import Memory, OomCount
from paceline.runtime.preemption import PREEMPTED
from paceline.runtime.process_names import Seat, counted, names

TAIL_LINES = 40
_SET_UP_S = 300.0  # a script that has reported no step for so long is not setting up any more
_TRACEBACK = "Traceback (most recent call last):"
# What torch puts before each line once torch.distributed is there: its rank, on a mesh in the unit.
_TORCHS_RANK = re.compile(r"^\[rank\d+\]: ")
_CHAINED = ("During handling of the above", "The above exception was the direct cause")
# A traceback's last line that tells of somebody else's end: our own errors, and what gloo says.
# Ours may be wrapped by torch, as in "RuntimeError: PeerLost: rank 2 ...".
_CONSEQUENCE = re.compile(
    rf"^(?:[\w.]+: .*)?(?:\w+\.)*\b(?:{'|'.join(names_of_peer_errors())})\b"
    r"|^[\w.]+: .*Connection (?:closed|reset) by peer"
)


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How one process ended. `was_stopped`: the launcher had told it to stop when it ended.

    `was_over`: every worker had ended before it, which only a server can do without harm.
    """

    seat: Seat
    pid: int
    status: ExitStatus
    ran_s: float
    was_stopped: bool = False
    was_over: bool = False
    was_frozen: bool = False
    stderr_tail: Sequence[str] = ()
    last_stdout: str = ""

    @property
    def has_failed(self) -> bool:
        is_good = self.status.is_success or self.status.is_preempted
        return not (is_good or self.was_stopped or self.was_over)

    @property
    def last_exception(self) -> str:
        """The line that ends the rank's last traceback, or "" when there was none."""
        block = traceback_tail(self.stderr_tail)
        if not block or not block[0].startswith(_TRACEBACK):
            return ""
        unindented = [line for line in block if line and not line[0].isspace()]
        named = [line for line in unindented if not line.startswith((_TRACEBACK, *_CHAINED))]
        return named[-1] if named else ""

    @property
    def is_consequence(self) -> bool:
        """True when the rank died of what happened to another one; a crash never is."""
        block = traceback_tail(self.stderr_tail)
        is_traceback = bool(block) and block[0].startswith(_TRACEBACK)
        is_exception = is_traceback and self.status.signal is None
        return is_exception and any(_CONSEQUENCE.match(line) for line in block)


def first_cause(failures: Sequence[RankResult]) -> RankResult | None:
    """Choose from failures in order of their end: the first cause, else the first consequence."""
    causes = [result for result in failures if not result.is_consequence]
    return next(iter(causes or failures), None)


def traceback_tail(lines: Sequence[str]) -> list[str]:
    """Cut the last traceback out of standard error, with those it was chained to; else all."""
    lines = [_TORCHS_RANK.sub("", line) for line in lines]
    starts = [i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return list(lines)
    start = starts.pop()
    while starts and any(line.startswith(_CHAINED) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return list(lines[start:])


def failure_report(
    results: Sequence[RankResult], first: RankResult, *, why_killed: str | None, log_hint: str = ""
) -> str:
    """Write the report: the first failing rank with its last words, then one line per other."""
    how = f"{first.status}, {why_killed}" if why_killed else str(first.status)
    where = f"pid {first.pid}" + (f", whole output in {log_hint}" if log_hint else "")
    text = [f"paceline: {first.seat} failed first: {how} after {first.ran_s:.1f} s ({where})"]
    text += [f"  | {line}" for line in last_words(first)]
    for line, seats in _grouped(results, first).items():
        text.append(f"paceline: {names(seats)}: {line}")
    return "\n".join(text)


def why_killed(status: ExitStatus, before: OomCount, after: OomCount, memory: Memory) -> str | None:
    """Say why a rank got SIGKILL where the kernel left evidence; never guess."""
    if status.signal != signal.SIGKILL:
        return None
    evidence = after.evidence_since(before)
    if evidence is None:
        return "by another process; no sign of the OOM killer"
    if memory.limit_bytes is None:
        return f"{evidence} ({memory_size(memory.total_bytes)} in all)"
    limit, peak = memory_size(memory.limit_bytes), memory_size(memory.peak_bytes)
    return f"{evidence} (limit {limit}, peak {peak})"


def state_words(result: RankResult, first: RankResult | None) -> str:
    """Say in a few words what became of one rank, as seen from the first failure."""
    if result.status.is_preempted:
        return "saved and stopped"
    if result.status.is_success:
        return "finished"
    if result.was_over and not result.was_stopped:
        return f"{result.status} after the last worker had ended"
    if first is None:
        return "stopped"
    if result.seat == first.seat:
        return f"failed: {result.status}"
    if result.was_stopped or result.is_consequence:
        return f"stopped because {first.seat} failed"
    return f"failed as well: {result.status}"


def last_words(first: RankResult) -> list[str]:
    """Return the end of what a process printed: its last traceback, if there is one."""
    words = traceback_tail(first.stderr_tail)
    if words:
        return words[-TAIL_LINES:]
    if first.last_stdout:
        return [f"(nothing on standard error; last line of output: {first.last_stdout})"]
    return ["(it printed nothing)"]


def _grouped(results: Sequence[RankResult], first: RankResult) -> dict[str, list[Seat]]:
    """Gather processes that met the same end, so that 64 of them still fit on a screen."""
    lines: dict[str, list[Seat]] = {}
    for result in results:
        if result.seat != first.seat:
            lines.setdefault(_one_line(result, first), []).append(result.seat)
    return lines


def _one_line(result: RankResult, first: RankResult) -> str:
    words = state_words(result, first)
    if result.was_frozen:
        words += "; it was frozen (SIGSTOP or a debugger) at that time"
    elif not result.was_stopped and result.last_exception:
        words += f" ({result.last_exception[:160]})"
    return words


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of every rank. `first` is the first cause of a failure, if there was one.

    Of an elastic job: `over` says why it could not go on, `lost` who was lost on the way, in order.
    """

    results: Sequence[RankResult]
    first: RankResult | None
    interrupted_by: signal.Signals | None
    wall_s: float
    oom_before: OomCount
    oom_after: OomCount
    memory: Memory
    over: str = ""
    lost: Sequence[RankResult] = ()

    @property
    def exit_code(self) -> int:
        """The script's own code, 128 + signal for a signal, 130 after Ctrl-C, 143 after SIGTERM; 75
        when workers have saved before they stopped."""
        if self.first is not None:
            return self.first.status.shell_code
        if self.over:
            return (self.lost[-1].status.shell_code if self.lost else 0) or 1
        if self.is_preempted:
            return PREEMPTED
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        return 0

    @property
    def is_preempted(self) -> bool:
        """Whether the workers have saved, to go on in another run."""
        return any(result.status.is_preempted for result in self.results)

    @property
    def was_lost_at_start(self) -> bool:
        """Whether processes were lost while they set up, and nothing else was wrong.

        Nothing has been achieved then that a new start would lose. While they set up, workers are
        not ready to go on without each other: they have nothing yet that they could hand over.
        """
        if self.interrupted_by is not None:
            return False
        ended = [*self.lost, *(one for one in self.results if not one.status.is_success)]
        is_lost = any(one.status.signal is not None and not one.was_stopped for one in ended)
        is_all = all(
            one.status.signal is not None or one.was_stopped or one.is_consequence for one in ended
        )
        return is_lost and is_all and self.wall_s < _SET_UP_S

    @property
    def was_lost_with_too_many(self) -> bool:
        """Whether the job was lost with too many of its processes, for no reason of its own."""
        if not self.over or not self.lost or self.interrupted_by is not None:
            return False
        first = self.first  # perhaps one that heard of the end, and raised it
        return first is None or first.is_consequence or "the job is over" in first.last_exception

    def closing_line(self) -> str:
        """Say in one line how the job ended."""
        num_servers = sum(result.seat.is_server for result in self.results)
        num_data_workers = sum(result.seat.is_data_worker for result in self.results)
        num_workers = len(self.results) - num_servers - num_data_workers
        count = counted(num_workers, num_servers, num_data_workers)
        took = f"{self.wall_s:.1f} s"
        if self.first is not None or self.over:
            return f"paceline: {count}, failed after {took}"
        if self.is_preempted:
            again = f"start it again to go on (exit code {PREEMPTED})"
            return f"paceline: {count} saved and stopped after {took}; {again}"
        if self.interrupted_by is not None:
            return f"paceline: {count} stopped by {self.interrupted_by.name} after {took}"
        return f"paceline: {count} finished in {took}"

    def late_ends(self) -> list[str]:
        """Say which servers ended badly when the workers were done: no failure, but no secret."""
        if self.first is not None:
            return []  # the report has a line for each
        return [
            f"paceline: {result.seat}: {state_words(result, None)} (pid {result.pid})"
            for result in self.results
            if result.was_over and not result.was_stopped and not result.status.is_success
        ]

    def failure_text(self, log_dir: Path | None) -> str | None:
        """Write the failure report, or return None when nothing failed by itself."""
        if self.over and self.first is None:
            return "\n".join([f"paceline: the job ended: {self.over}", *self._last_loss(log_dir)])
        if self.first is None:
            return None
        why = why_killed(self.first.status, self.oom_before, self.oom_after, self.memory)
        log_hint = _log_hint(self.first, log_dir)
        return failure_report(self.results, self.first, why_killed=why, log_hint=log_hint)

    def _last_loss(self, log_dir: Path | None) -> list[str]:
        """Show the last words of the one whose loss was too much."""
        if not self.lost:
            return []
        last = self.lost[-1]
        hint = _log_hint(last, log_dir)
        where = f"pid {last.pid}" + (f", whole output in {hint}" if hint else "")
        how = f"{last.status} after {last.ran_s:.1f} s ({where})"
        return [
            f"paceline: the last loss was {last.seat.role} {last.seat.number}: {how}",
            *(f"  | {line}" for line in last_words(last)),
        ]


def _log_hint(result: RankResult, log_dir: Path | None) -> str:
    return "" if log_dir is None else str(log_dir / result.seat.log_name)
