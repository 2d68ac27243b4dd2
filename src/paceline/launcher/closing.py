"""The closing summary: what ran, how fast, where the time went, and what to do about it.

It fits on one screen of 24 lines and 80 columns for up to eight workers. Tables of staleness, which
have a line for each worker, are told in one line each where they would not fit.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.figures import number, rate
from paceline.launcher.advice import slowest_words
from paceline.launcher.board import BY_THEMSELVES, Board, Picture, Row
from paceline.launcher.lines import printable
from paceline.launcher.table import table_lines
from paceline.telemetry import staleness
from paceline.telemetry.staleness import TableReport

_SCREEN_LINES = 24
_MOST_ROWS = 16
_LONGEST_COMMAND = 40


@dataclass(frozen=True, kw_only=True)
class Closing:
    """What is to be said when a job has ended. `told`: sentences about traffic, the end, ..."""

    command: str
    board: Board
    reports: Sequence[TableReport] = ()
    told: Sequence[str] = ()
    has_servers: bool = False

    def lines(self, width: int, height: int | None) -> list[str]:
        """Write it for a screen of so many columns and lines. In a file (None lines) a sentence is
        one line, and nothing is told in short."""
        before, after = self._table(width), [f"paceline: {text}" for text in self.told]
        board = self.board
        advice = slowest_words(
            board.state.waits, self.reports, board.state.mesh, has_servers=self.has_servers
        )
        if advice is not None:
            before.append(f"paceline: {advice}")
        tables = [printable(line.encode()) for line in staleness.describe(self.reports)]
        if height is None:
            return [*before, *tables, *after]
        before, after = _broken(before, width), _broken(after, width)
        room = max(height, _SCREEN_LINES) - len(before) - len(after) - 2  # the end, the prompt
        if len(tables) > room:
            tables = _broken(
                [f"paceline: {line}" for line in staleness_in_short(self.reports)], width
            )
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
