"""Staleness of updates and waits between workers: as servers count them, and as text.

Each server counts on its own. A worker's step is one update on each server that holds a shard of
the table, and the worker waits for all servers at once: a sum over the servers would count a step,
and a second, once per server. `merge` therefore takes, for each worker, the server on which its
updates were stalest on average, and the server on which it waited longest. Both are real counts,
and upper bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

ALL_SERVERS = -1  # instead of a server's number: merged counts of several servers

_MAX_TABLES = 8
_MAX_NAMES = 2
_MAX_BINS = 16
_HEIGHTS = ".:-=+*#@"


class WorkerReport(msgspec.Struct, frozen=True):
    """What a server counted about one worker."""

    worker: int
    updates: int
    staleness: dict[int, int] = {}  # of its updates: versions -> number of updates
    waited_s: dict[int, float] = {}  # worker waited for -> seconds
    dropped: int = 0  # too old
    skipped: int = 0  # not finite
    overwritten: int = 0  # versions of other workers that its values replaced

    @property
    def mean_staleness(self) -> float:
        """Mean number of versions of other workers that its updates had not seen."""
        counted = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / max(counted, 1)

    @property
    def max_staleness(self) -> int:
        """The same, for its stalest update."""
        return max(self.staleness, default=0)

    @property
    def total_wait_s(self) -> float:
        """Total time that it waited for other workers."""
        return sum(self.waited_s.values())


class TableReport(msgspec.Struct, frozen=True, tag_field="type", tag="table"):
    """What a server counted about one table."""

    table: str
    server: int
    version: int
    workers: tuple[WorkerReport, ...] = ()


def merge(reports: Sequence[TableReport]) -> list[TableReport]:
    """Return one report per table. The last report of each server counts."""
    newest = {(report.table, report.server): report for report in reports}
    tables: dict[str, list[TableReport]] = {}
    for report in newest.values():
        tables.setdefault(report.table, []).append(report)
    return [_merge_servers(of_table) for of_table in tables.values()]


def _merge_servers(reports: Sequence[TableReport]) -> TableReport:
    seen: dict[int, list[WorkerReport]] = {}
    for worker in (worker for report in reports for worker in report.workers):
        seen.setdefault(worker.worker, []).append(worker)
    return TableReport(
        table=reports[0].table,
        server=reports[0].server if len(reports) == 1 else ALL_SERVERS,
        version=max(report.version for report in reports),
        workers=tuple(_merge_worker(counts) for _, counts in sorted(seen.items())),
    )


def _merge_worker(counts: Sequence[WorkerReport]) -> WorkerReport:
    stalest = max(counts, key=lambda count: (count.mean_staleness, count.updates))
    slowest = max(counts, key=lambda count: count.total_wait_s)
    return WorkerReport(
        worker=stalest.worker,
        updates=stalest.updates,
        staleness=stalest.staleness,
        waited_s=slowest.waited_s,
        dropped=max(count.dropped for count in counts),
        skipped=max(count.skipped for count in counts),
        overwritten=max(count.overwritten for count in counts),
    )


def waited_for(reports: Sequence[TableReport]) -> dict[int, dict[int, float]]:
    """Return how long each worker waited for each other worker.

    A worker waits for all tables at once: the table with the longest wait counts.
    """
    longest: dict[int, WorkerReport] = {}
    for one in (worker for report in merge(reports) for worker in report.workers):
        if one.worker not in longest or one.total_wait_s > longest[one.worker].total_wait_s:
            longest[one.worker] = one
    return {number: dict(one.waited_s) for number, one in longest.items()}


def describe(reports: Sequence[TableReport]) -> list[str]:
    """Return the counts of each table as text of at most 100 columns."""
    merged = [report for report in merge(reports) if report.workers]
    lines = [line for report in merged[:_MAX_TABLES] for line in _describe_table(report)]
    if len(merged) > _MAX_TABLES:
        lines.append(f"... and {len(merged) - _MAX_TABLES} more tables")
    return lines


def _describe_table(report: TableReport) -> list[str]:
    where = " (highest of the servers)" if report.server == ALL_SERVERS else ""
    oldest = max(worker.max_staleness for worker in report.workers)
    width = ceil((oldest + 1) / _MAX_BINS)  # of a bin, in versions
    scale = f"0..{oldest}"
    lines = [
        f"{report.table:.30}: version {report.version}; staleness in versions{where}",
        f"  worker  updates   mean    max  {scale:{_MAX_BINS + 2}}   waited  for worker",
    ]
    for worker in report.workers:
        bars = f"|{_bars(worker, ceil((oldest + 1) / width), width)}|"
        lines.append(
            f"  {worker.worker:6}  {worker.updates:7}  {worker.mean_staleness:5.1f}  "
            f"{worker.max_staleness:5}  {bars:{_MAX_BINS + 2}}  {_time(worker.total_wait_s):>7}  "
            f"{_names(worker)}".rstrip()
        )
    return lines + [_lost(worker) for worker in report.workers if _lost(worker)]


def _bars(worker: WorkerReport, num_bins: int, width: int) -> str:
    """Return a histogram with one character per bin; empty bins are blank."""
    bins = [0] * num_bins
    for age, count in worker.staleness.items():
        bins[age // width] += count
    top = max(max(bins), 1)
    heights = [ceil(count * len(_HEIGHTS) / top) for count in bins]
    return "".join(_HEIGHTS[height - 1] if height else " " for height in heights)


def _names(worker: WorkerReport) -> str:
    """Return the workers that it waited for, the longest wait first."""
    longest = sorted(worker.waited_s.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} ({_time(time_s)})" for name, time_s in longest[:_MAX_NAMES]]
    return ", ".join(shown + ["..."] * (len(longest) > _MAX_NAMES))


def _lost(worker: WorkerReport) -> str:
    """Return how many of its pushes were not simply added; "" if there were none."""
    parts = [
        f"dropped {worker.dropped} (too old)" * (worker.dropped > 0),
        f"left out {worker.skipped} (not finite)" * (worker.skipped > 0),
        f"overwrote {worker.overwritten} versions" * (worker.overwritten > 0),
    ]
    text = ", ".join(part for part in parts if part)
    return f"  worker {worker.worker}: {text}" if text else ""


def _time(time_s: float) -> str:
    if time_s < 9.99:
        return f"{time_s:.2f} s"
    if time_s < 999:
        return f"{time_s:.1f} s"
    return f"{time_s / 60:.0f} min" if time_s < 36_000 else f"{time_s / 3600:.0f} h"
