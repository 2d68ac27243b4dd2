"""The closing summary: what ran, how fast, who or what held it up, and what to do about it.

It fits on one screen of 24 lines and 80 columns for up to eight workers. Tables of staleness, which
have a line for each worker, are told in one line each where they would not fit.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.observe.display.board import BY_THEMSELVES, Board, Picture, Row
from paceline.observe.display.lines import printable
from paceline.observe.display.table import table_lines
from paceline.observe.telemetry import staleness
from paceline.observe.telemetry.run_state import RunState
from paceline.observe.telemetry.staleness import TableReport
from paceline.observe.telemetry.step_times import Slowest
from paceline.runtime.formatting import number, rate
from paceline.runtime.mesh import Mesh

_SCREEN_LINES = 24
_MOST_ROWS = 16
_LONGEST_COMMAND = 40


@dataclass(frozen=True, kw_only=True)
class Closing:
    """What is to be said when a job has ended. `told`: sentences about traffic, the end, ..."""

    command: str
    board: Board
    told: Sequence[str] = ()

    def lines(self, width: int, height: int | None) -> list[str]:
        """Write it for a screen of so many columns and lines. In a file (None lines) a sentence is
        one line, and nothing is told in short."""
        before, after = self._table(width), [f"paceline: {text}" for text in self.told]
        advice, reports = slowest_words(self.board.state), self.board.state.table_reports()
        if advice is not None:
            before.append(f"paceline: {advice}")
        tables = [printable(line.encode()) for line in staleness.describe(reports)]
        if height is None:
            return [*before, *tables, *after]
        before, after = _broken(before, width), _broken(after, width)
        room = max(height, _SCREEN_LINES) - len(before) - len(after) - 2  # the end, the prompt
        if len(tables) > room:
            tables = _broken([f"paceline: {line}" for line in staleness_in_short(reports)], width)
        return [*before, *tables, *after]

    def _table(self, width: int) -> list[str]:
        if not self.board.has_progress:
            return []
        rows = self.board.final_rows()
        picture = Picture(self.board.columns, rows, "")
        lines = table_lines(picture, width, limit=_MOST_ROWS)
        return [f"paceline: {self._headline(rows)}", *lines]

    def _headline(self, rows: Sequence[Row]) -> str:
        """Say what ran, and what came of it: of all workers together."""
        command = printable(self.command.encode("utf-8", "surrogateescape"))
        if len(command) > _LONGEST_COMMAND:
            command = command[: _LONGEST_COMMAND - 3] + "..."
        workers = [row for row in rows if row.label.isdigit() and row.step is not None]
        words = _steps(workers)
        speeds = [row.steps_per_s for row in workers if row.steps_per_s is not None]
        if speeds:
            words.append(f"{rate(min(speeds))} steps/s")
        samples = [row.samples_per_s for row in workers if row.samples_per_s is not None]
        if samples:
            words.append(f"{rate(sum(samples))} samples/s")
        own = [name for name in self.board.columns if name not in BY_THEMSELVES]
        for name in own[:1]:
            values = [row.values[name] for row in workers if name in row.values]
            words += [f"{name} {number(values[0])}"] if values else []
        return f"{command}: {', '.join(words)}" if words else command


def staleness_in_short(reports: Sequence[TableReport]) -> list[str]:
    """Say in one line for each table how stale its updates were; the table of workers has means."""
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


def _steps(workers: Sequence[Row]) -> list[str]:
    steps = [row.step for row in workers if row.step is not None]
    if not steps:
        return []
    low, high = min(steps), max(steps)
    return [f"{high} step{'s' if high != 1 else ''}" if low == high else f"{low} to {high} steps"]


def _broken(lines: Sequence[str], width: int) -> list[str]:
    """Break sentences between words where a terminal would break them anywhere."""
    broken: list[str] = []
    for line in lines:
        is_sentence = line.startswith("paceline: ")
        broken += textwrap.wrap(line, width, subsequent_indent="  ") if is_sentence else [line]
    return broken


_CAUSES = {"input": "its input (data loading)", "compute": "its computation"}
_MORE_LOADERS = "give it more loader workers (num_workers=)"
_BY_SPEED = 'share by speed: pl.shard(mode="dynamic")'
_NO_WAITING = (
    '--pace ssp:3 or async (with -s 1) would not wait for it, pl.shard(batch="auto") gives it less'
    " to do"
)
_LESS_WAITING = "--pace async, or ssp with a larger bound, would wait for it less"
# Parts of one model go in lockstep at any pace.
_IN_A_UNIT = {
    "pp": "if its stage has more to do than others, leave splits= out: the cuts are then measured",
    "fsdp": "if its batches are larger than others', make them equal; else see who is on its core",
    "tp": "all on tp have the same to do: see what shares its core, or limits it",
}
_EXCHANGE_OF = {
    "pp": 'more microbatches= or schedule="zero-bubble" make the gaps of a pipeline smaller',
    "fsdp": "larger batches gather the parameters less often; where the model fits, dp sends less",
    "tp": "larger batches, or tp over fewer processes, send less for each sample",
}


def slowest_words(state: RunState) -> str | None:
    """Name the slowest worker, its cause, and what to do; None where nothing is worth a word."""
    slowest, mesh, has_servers = state.slowest(), state.mesh, state.has_servers
    if slowest is None:
        return None
    worker = slowest.worker
    if worker is None:
        return _exchange_words(slowest.cost, mesh, has_servers=has_servers)
    return (
        f"slowest: rank {worker}{_place(worker, mesh)}, {_times(slowest)} the others' time per"
        f" step, in {_CAUSES[slowest.cause]}: the others waited {100 * slowest.waited:.0f} % of"
        f" theirs for it; {_remedy(slowest.cause, mesh, has_servers=has_servers)}"
    )


def _remedy(cause: str, mesh: Mesh | None, *, has_servers: bool) -> str:
    axis = _inner_axis(mesh)
    if cause == "input":
        return _MORE_LOADERS if axis else f"{_MORE_LOADERS}, or {_BY_SPEED}"
    if axis is not None:
        return _IN_A_UNIT[axis]
    return _LESS_WAITING if has_servers else _NO_WAITING


def _exchange_words(cost: float, mesh: Mesh | None, *, has_servers: bool) -> str:
    axis = _inner_axis(mesh)
    if axis is not None:
        where, remedy = f"waiting for each other on {mesh}", _EXCHANGE_OF[axis]
    elif has_servers:
        where = "the exchange with the servers"
        remedy = "send less (compress=int8), or use more servers (-s)"
    else:
        where = "the exchange itself"
        remedy = "send less (compress=int8), or less often (--pace local:8)"
    return f"nobody is slow: {100 * cost:.0f} % of the time went into {where}; {remedy}"


def _inner_axis(mesh: Mesh | None) -> str | None:
    """Return the axis inside a unit on which most is waited: that of stages, if there is one."""
    return mesh.inner[0][0] if mesh is not None and mesh.inner else None


def _place(worker: int, mesh: Mesh | None) -> str:
    """Say which part of the model a worker has."""
    if mesh is None or not mesh.inner:
        return ""
    return f" ({', '.join(f'{axis} {mesh.index(worker, axis)}' for axis, _ in mesh.inner)})"


def _times(slowest: Slowest) -> str:
    return f"{slowest.times:.1f} times" if slowest.times < 100 else "more than 100 times"
