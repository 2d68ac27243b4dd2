"""The closing summary: what ran, how fast, which worker slowed it down, and what to do about it.

It fits on one screen of 24 lines and 80 columns for up to eight workers. A staleness table has a
line for each worker; if it does not fit, it becomes one line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.observe.display.board import AUTOMATIC, Board, BoardSnapshot, ProcessRow
from paceline.observe.display.lines import printable
from paceline.observe.display.table import table_lines
from paceline.observe.telemetry import staleness
from paceline.observe.telemetry.run_state import RunState
from paceline.observe.telemetry.staleness import TableReport
from paceline.observe.telemetry.step_times import Bottleneck
from paceline.runtime.formatting import number, rate
from paceline.runtime.mesh import Mesh

_SCREEN_LINES = 24
_MAX_ROWS = 16
_MAX_COMMAND = 40


@dataclass(frozen=True, kw_only=True)
class ClosingSummary:
    """The lines at the end of a job. `sentences`: about traffic, the end, ..."""

    command: str
    board: Board
    sentences: Sequence[str] = ()

    def lines(self, width: int, height: int | None) -> list[str]:
        """Return the lines for a screen of so many columns and lines. In a file (None lines) each
        sentence is one line, and nothing is shortened."""
        before, after = self._table(width), [f"paceline: {text}" for text in self.sentences]
        advice, reports = describe_bottleneck(self.board.state), self.board.state.table_reports()
        if advice is not None:
            before.append(f"paceline: {advice}")
        tables = [printable(line.encode()) for line in staleness.describe(reports)]
        if height is None:
            return [*before, *tables, *after]
        before, after = _wrap(before, width), _wrap(after, width)
        room = (
            max(height, _SCREEN_LINES) - len(before) - len(after) - 2
        )  # the last line and the prompt
        if len(tables) > room:
            tables = _wrap([f"paceline: {line}" for line in short_staleness(reports)], width)
        return [*before, *tables, *after]

    def _table(self, width: int) -> list[str]:
        if not self.board.has_progress:
            return []
        rows = self.board.final_rows()
        snapshot = BoardSnapshot(self.board.columns, rows, "")
        lines = table_lines(snapshot, width, limit=_MAX_ROWS)
        return [f"paceline: {self._headline(rows)}", *lines]

    def _headline(self, rows: Sequence[ProcessRow]) -> str:
        """Return what ran, and the results of all workers together."""
        command = printable(self.command.encode("utf-8", "surrogateescape"))
        if len(command) > _MAX_COMMAND:
            command = command[: _MAX_COMMAND - 3] + "..."
        workers = [row for row in rows if row.label.isdigit() and row.step is not None]
        parts = _steps(workers)
        speeds = [row.steps_per_s for row in workers if row.steps_per_s is not None]
        if speeds:
            parts.append(f"{rate(min(speeds))} steps/s")
        samples = [row.samples_per_s for row in workers if row.samples_per_s is not None]
        if samples:
            parts.append(f"{rate(sum(samples))} samples/s")
        own = [name for name in self.board.columns if name not in AUTOMATIC]
        for name in own[:1]:
            values = [row.values[name] for row in workers if name in row.values]
            parts += [f"{name} {number(values[0])}"] if values else []
        return f"{command}: {', '.join(parts)}" if parts else command


def short_staleness(reports: Sequence[TableReport]) -> list[str]:
    """Return one line per table about its staleness; the table of workers has the means."""
    lines = []
    for table in staleness.merge(reports)[:2]:
        if not table.workers:
            continue
        stalest = max(table.workers, key=lambda worker: worker.mean_staleness)
        longest = max(table.workers, key=lambda worker: worker.total_wait_s)
        text = f"{printable(table.table.encode()):.30}: version {table.version}; stalest: worker"
        text += f" {stalest.worker}, {stalest.mean_staleness:.1f} versions on average, at most"
        text += f" {max(worker.max_staleness for worker in table.workers)}"
        if longest.total_wait_s >= 0.01:
            text += f"; worker {longest.worker} waited longest, {longest.total_wait_s:.1f} s"
        lines.append(text)
    return lines


def _steps(workers: Sequence[ProcessRow]) -> list[str]:
    steps = [row.step for row in workers if row.step is not None]
    if not steps:
        return []
    low, high = min(steps), max(steps)
    return [f"{high} step{'s' if high != 1 else ''}" if low == high else f"{low} to {high} steps"]


def _wrap(lines: Sequence[str], width: int) -> list[str]:
    """Wrap sentences between words; a terminal would break them anywhere."""
    wrapped: list[str] = []
    for line in lines:
        is_sentence = line.startswith("paceline: ")
        wrapped += textwrap.wrap(line, width, subsequent_indent="  ") if is_sentence else [line]
    return wrapped


_CAUSES = {"input": "its input (data loading)", "compute": "its computation"}
_MORE_LOADERS = "give it more loader workers (num_workers=)"
_BY_SPEED = 'split the data by speed: pl.shard(mode="dynamic")'
_NO_WAITING = (
    '--pace ssp:3 or async (with -s 1) does not wait for it, pl.shard(batch="auto") gives it less'
    " work"
)
_LESS_WAITING = "--pace async, or ssp with a larger bound, waits less for it"
# The workers of a unit run in lockstep at any pace.
_IN_A_UNIT = {
    "pp": "if its stage has more work than the others, leave out splits=: Paceline measures them",
    "fsdp": "if its batches are larger, make them equal; else check what else runs on its core",
    "tp": "all workers on tp have the same work: check what else runs on its core, or limits it",
}
_EXCHANGE_OF = {
    "pp": 'more microbatches= or schedule="zero-bubble" reduce the idle time of the pipeline',
    "fsdp": "larger batches gather the parameters less often; if the model fits, dp sends less",
    "tp": "larger batches, or tp over fewer processes, send less per sample",
}


def describe_bottleneck(state: RunState) -> str | None:
    """Return which worker is slow, why, and what to do; None if little time is lost."""
    slowest, mesh, has_servers = state.bottleneck(), state.mesh, state.has_servers
    if slowest is None:
        return None
    worker = slowest.worker
    if worker is None:
        return _exchange_text(slowest.cost, mesh, has_servers=has_servers)
    return (
        f"slowest: worker {worker}{_unit_position(worker, mesh)}, which takes {_times(slowest)}"
        f" as long per step as the others because of {_CAUSES[slowest.cause]}: the other workers"
        f" waited {100 * slowest.waited:.0f} % of the time for it;"
        f" {_remedy(slowest.cause, mesh, has_servers=has_servers)}"
    )


def _remedy(cause: str, mesh: Mesh | None, *, has_servers: bool) -> str:
    axis = _inner_axis(mesh)
    if cause == "input":
        return _MORE_LOADERS if axis else f"{_MORE_LOADERS}, or {_BY_SPEED}"
    if axis is not None:
        return _IN_A_UNIT[axis]
    return _LESS_WAITING if has_servers else _NO_WAITING


def _exchange_text(cost: float, mesh: Mesh | None, *, has_servers: bool) -> str:
    axis = _inner_axis(mesh)
    if axis is not None:
        where, remedy = f"waiting for each other on {mesh}", _EXCHANGE_OF[axis]
    elif has_servers:
        where = "the exchange with the servers"
        remedy = "send less (compress=int8), or use more servers (-s)"
    else:
        where = "the exchange itself"
        remedy = "send less (compress=int8), or less often (--pace local:8)"
    return f"no worker is slow: {100 * cost:.0f} % of the time went into {where}; {remedy}"


def _inner_axis(mesh: Mesh | None) -> str | None:
    """Return the axis inside a unit with most waiting: pp, if there is one."""
    return mesh.inner[0][0] if mesh is not None and mesh.inner else None


def _unit_position(worker: int, mesh: Mesh | None) -> str:
    """Return which shard of the model a worker has, as " (pp 1)"."""
    if mesh is None or not mesh.inner:
        return ""
    return f" ({', '.join(f'{axis} {mesh.index(worker, axis)}' for axis, _ in mesh.inner)})"


def _times(slowest: Bottleneck) -> str:
    return f"{slowest.times:.1f} times" if slowest.times < 100 else "more than 100 times"
