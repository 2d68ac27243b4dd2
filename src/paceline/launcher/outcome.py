"""The end of a job: its exit code, and what the launcher prints about it.

The report names the first cause of a failure with its traceback; every other process gets one line
(processes/table.py tells causes from consequences). If a script reports no progress and succeeds,
the launcher prints nothing: `paceline run` then looks like the script itself. Otherwise the closing
summary comes first and the failure report last, because the end of the output is what people read
and paste.

Pure functions over values: the launcher collects `ProcessResult`s, tests make them by hand.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launcher.processes.process import ExitStatus
from paceline.launcher.processes.table import ProcessResult, traceback_tail
from paceline.runtime.formatting import memory_size
from paceline.runtime.machine import MemoryInfo, OomCount
from paceline.runtime.preemption import PREEMPTED
from paceline.runtime.process_names import ProcessName, counted, names

TAIL_LINES = 40
_SET_UP_S = 300.0  # a script that has reported no step for so long is no longer setting up


def failure_report(
    results: Sequence[ProcessResult],
    first: ProcessResult,
    *,
    why_killed: str | None,
    log_hint: str = "",
) -> str:
    """Return the report: the first cause with its last output, then a line per other process."""
    how = f"{first.status}, {why_killed}" if why_killed else str(first.status)
    where = _where(first, log_hint)
    text = _frozen_lines(results) if first.is_consequence else []
    text += [f"paceline: {first.name} failed first: {how} after {first.ran_s:.1f} s ({where})"]
    text += [f"  | {line}" for line in last_output(first)]
    for line, those in _grouped(results, first).items():
        text.append(f"paceline: {names(those)}: {line}")
    return "\n".join(text)


def _frozen_lines(results: Sequence[ProcessResult]) -> list[str]:
    """Return a line for each process that was frozen, which the others gave up."""
    return [
        f"paceline: {result.name} was frozen (SIGSTOP or a debugger), and the other processes gave"
        f" it up ({_where(result, '')})"
        for result in results
        if result.was_frozen
    ]


def _where(result: ProcessResult, log_hint: str) -> str:
    host = f" on host {result.host_name}" if result.host_name else ""
    return f"pid {result.pid}{host}" + (f", whole output in {log_hint}" if log_hint else "")


def why_killed(
    status: ExitStatus, before: OomCount, after: OomCount, memory: MemoryInfo
) -> str | None:
    """Return why a process got SIGKILL if the kernel left evidence; never guess."""
    if status.signal != signal.SIGKILL or status.text:
        return None
    evidence = after.evidence_since(before)
    if evidence is None:
        return "by another process; no sign of the OOM killer"
    if memory.limit_bytes is None:
        return f"{evidence} ({memory_size(memory.total_bytes)} in all)"
    limit, peak = memory_size(memory.limit_bytes), memory_size(memory.peak_bytes)
    return f"{evidence} (limit {limit}, peak {peak})"


def state_words(result: ProcessResult, first: ProcessResult | None) -> str:
    """Return in a few words how one process ended, given the first failure."""
    if result.status.is_preempted:
        return "saved and stopped"
    if result.status.is_success:
        return "finished"
    if result.ended_last and not result.was_stopped:
        return f"{result.status} after the last worker had ended"
    if first is None:
        return "stopped"
    if result.name == first.name:
        return f"failed: {result.status}"
    if result.was_stopped or result.is_consequence:
        return f"stopped because {first.name} failed"
    return f"failed as well: {result.status}"


def last_output(result: ProcessResult) -> list[str]:
    """Return the end of what a process printed: its last traceback, if there is one."""
    lines = traceback_tail(result.stderr_tail)
    if lines:
        return lines[-TAIL_LINES:]
    if result.last_stdout:
        return [f"(nothing on standard error; last line of output: {result.last_stdout})"]
    return ["(it printed nothing)"]


def _grouped(
    results: Sequence[ProcessResult], first: ProcessResult
) -> dict[str, list[ProcessName]]:
    """Group processes that ended alike, so that 64 of them fit on a screen."""
    lines: dict[str, list[ProcessName]] = {}
    for result in results:
        if result.name != first.name:
            lines.setdefault(_one_line(result, first), []).append(result.name)
    return lines


def _one_line(result: ProcessResult, first: ProcessResult) -> str:
    text = state_words(result, first)
    if result.was_frozen:
        text += "; it was frozen (SIGSTOP or a debugger) at that time"
    elif not result.was_stopped and result.last_exception:
        text += f" ({result.last_exception[:160]})"
    return text


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """How a job ended. `first` is the first cause of a failure, if there was one.

    Of an elastic job: `over` is why it could not continue, `lost` the processes it lost, in order.
    """

    results: Sequence[ProcessResult]
    first: ProcessResult | None
    interrupted_by: signal.Signals | None
    wall_s: float
    oom_before: OomCount
    oom_after: OomCount
    memory: MemoryInfo
    over: str = ""
    lost: Sequence[ProcessResult] = ()

    @property
    def exit_code(self) -> int:
        """The script's own code, 128 + signal for a signal, 130 after Ctrl-C, 143 after SIGTERM; 75
        if the workers saved a checkpoint before they stopped."""
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
        """Whether the workers saved a checkpoint, so that another run can resume."""
        return any(result.status.is_preempted for result in self.results)

    @property
    def was_lost_at_start(self) -> bool:
        """Whether processes were lost during setup, and nothing else failed.

        A new start then loses no work. During setup workers cannot continue without each other:
        they have no state yet that they could transfer.
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
        """Whether the job ended only because it lost too many of its processes."""
        if not self.over or not self.lost or self.interrupted_by is not None:
            return False
        first = self.first  # may be a worker that raised the end of the job
        return first is None or first.is_consequence or "the job is over" in first.last_exception

    def closing_line(self) -> str:
        """Return one line about how the job ended."""
        num_servers = sum(result.name.is_server for result in self.results)
        num_data_workers = sum(result.name.is_data_worker for result in self.results)
        num_workers = len(self.results) - num_servers - num_data_workers
        count = counted(num_workers, num_servers, num_data_workers)
        took = f"{self.wall_s:.1f} s"
        if self.first is not None or self.over:
            return f"paceline: {count}, failed after {took}"
        if self.is_preempted:
            again = f"start it again to resume (exit code {PREEMPTED})"
            return f"paceline: {count} saved and stopped after {took}; {again}"
        if self.interrupted_by is not None:
            return f"paceline: {count} stopped by {self.interrupted_by.name} after {took}"
        return f"paceline: {count} finished in {took}"

    def late_failures(self) -> list[str]:
        """Return a line for each server that failed after the workers had ended."""
        if self.first is not None:
            return []  # the failure report has a line for each
        return [
            f"paceline: {result.name}: {state_words(result, None)} (pid {result.pid})"
            for result in self.results
            if result.ended_last and not result.was_stopped and not result.status.is_success
        ]

    def failure_text(self, log_dir: Path | None) -> str | None:
        """Return the failure report, or None if nothing failed on its own."""
        if self.over and self.first is None:
            return "\n".join([f"paceline: the job ended: {self.over}", *self._last_loss(log_dir)])
        if self.first is None:
            return None
        why = self.first.reason or why_killed(
            self.first.status, self.oom_before, self.oom_after, self.memory
        )
        log_hint = _log_hint(self.first, log_dir)
        return failure_report(self.results, self.first, why_killed=why, log_hint=log_hint)

    def _last_loss(self, log_dir: Path | None) -> list[str]:
        """Return the last output of the process whose loss ended the job."""
        if not self.lost:
            return []
        last = self.lost[-1]
        hint = _log_hint(last, log_dir)
        how = f"{last.status} after {last.ran_s:.1f} s ({_where(last, hint)})"
        return [
            f"paceline: the last loss was {last.name.role} {last.name.number}: {how}",
            *(f"  | {line}" for line in last_output(last)),
        ]


def _log_hint(result: ProcessResult, log_dir: Path | None) -> str:
    return "" if log_dir is None else str(log_dir / result.name.log_name)
