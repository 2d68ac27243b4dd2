"""The end of a job: its exit code and what the user is told.

A script that reports no progress and succeeds gets no words at all: `paceline run` then looks like
the script itself. Otherwise the closing summary comes first and the failure report last, because
the end of the output is what people read and paste.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launcher.machine import Memory, OomCount
from paceline.launcher.report import (
    RankResult,
    failure_report,
    last_words,
    state_words,
    why_killed,
)
from paceline.launcher.seat import counted
from paceline.stopping import PREEMPTED


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
