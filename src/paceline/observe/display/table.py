"""The table of a job's processes: which columns fit into a terminal, and their layout.

Numbers are never cut. If there is no room, whole columns are dropped in this order: the script's
values after the first one, bytes, a state that all share, the shares of time, staleness, the first
value (usually a loss). Rank, step and speed stay, and the state if processes differ in it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from paceline.observe.display.board import BoardSnapshot, ProcessRow
from paceline.runtime.formatting import cut, megabytes, number, rate, width_of

_GAPS = (3, 2)  # between columns
_SHORT_STATE = 12  # a longer state is cut before a column is dropped
_MAX_LINES_BELOW = 2  # the table
_ALWAYS = 100


@dataclass(frozen=True)
class _Column:
    title: str
    cells: Sequence[str]
    worth: int  # the column with the lowest is dropped first
    is_text: bool = False

    @property
    def width(self) -> int:
        return max(width_of(cell) for cell in (self.title, *self.cells))

    @property
    def least_width(self) -> int:
        if not self.is_text:
            return self.width
        return min(self.width, max(_SHORT_STATE, width_of(self.title)))


class _Numbers(NamedTuple):
    title: str
    read: Callable[[ProcessRow], Any]
    write: Callable[[Any], str]
    worth: int


def table_lines(snapshot: BoardSnapshot, width: int, *, limit: int) -> list[str]:
    """Return a title line and a line for each of at most `limit` processes, `width` wide."""
    shown = snapshot.rows[: limit - 1] if len(snapshot.rows) > limit else snapshot.rows
    columns = _columns(snapshot, shown)
    gap, dropped = _GAPS[0], list[_Column]()
    while _width(columns, gap) > width:
        least = min(columns, key=lambda column: column.worth)
        if gap > _GAPS[-1]:
            gap = _GAPS[-1]
        elif least.worth >= _ALWAYS:
            break
        else:
            columns.remove(least)
            dropped.append(least)
    lines = _laid_out(columns, width, gap)
    if len(shown) < len(snapshot.rows):
        lines.append(cut(f"... {_rest(snapshot.rows[len(shown) :])}", width))
    lines += _below(snapshot, dropped, width)
    return lines


def _columns(snapshot: BoardSnapshot, rows: Sequence[ProcessRow]) -> list[_Column]:
    """Return the columns that have a value, with the script's values in the middle."""
    has_samples = any(row.samples_per_s is not None for row in snapshot.rows)
    numbers: list[_Numbers] = [
        _Numbers("step", lambda row: row.step, str, _ALWAYS),
        _Numbers("samples/s", lambda row: row.samples_per_s, rate, _ALWAYS)
        if has_samples
        else _Numbers("steps/s", lambda row: row.steps_per_s, rate, _ALWAYS),
        *(
            _Numbers(name, partial(_reported, name), number, -index if index else 90)
            for index, name in enumerate(snapshot.columns)
        ),
        _Numbers("input %", lambda row: row.input, _percent, 30),
        _Numbers("compute %", lambda row: row.compute, _percent, 25),
        _Numbers("wait %", lambda row: row.wait, _percent, 80),
        _Numbers("stale", lambda row: row.staleness, "{:.1f}".format, 40),
        _Numbers("MB/s", lambda row: row.sent_per_s, megabytes, 10),
    ]
    columns = [_Column("rank", [row.label for row in rows], _ALWAYS)]
    for title, read, write, worth in numbers:
        if worth == _ALWAYS or any(read(row) is not None for row in snapshot.rows):
            columns.append(_Column(title, [_cell(read(row), write) for row in rows], worth))
    is_shared = len({row.state for row in snapshot.rows}) == 1
    states = [row.state for row in rows]
    columns.append(_Column("state", states, 20 if is_shared else _ALWAYS, is_text=True))
    return columns


def _reported(name: str, row: ProcessRow) -> float | None:
    return row.values.get(name)


def _cell(value: Any, write: Callable[[Any], str]) -> str:
    return "-" if value is None else write(value)


def _percent(share: float) -> str:
    return f"{share:.0f}"


def _width(columns: Sequence[_Column], gap: int) -> int:
    return sum(column.least_width for column in columns) + gap * (len(columns) - 1)


def _laid_out(columns: Sequence[_Column], width: int, gap: int) -> list[str]:
    """Return titles and rows; the state is text, comes last and gets the rest of a line."""
    lines = []
    widths = [column.width for column in columns]
    for index in range(-1, len(columns[0].cells)):
        line, room = "", width
        for column, own in zip(columns, widths, strict=True):
            text = column.title if index < 0 else column.cells[index]
            if column.is_text:
                line += cut(text, max(room, column.least_width))
            else:
                line += " " * (own - width_of(text)) + text + " " * gap
                room -= own + gap
        lines.append(line.rstrip())
    return lines


def _rest(rows: Sequence[ProcessRow]) -> str:
    states: dict[str, int] = {}
    for row in rows:
        states[row.state] = states.get(row.state, 0) + 1
    return ", ".join(f"{count} more {state}" for state, count in list(states.items())[:3])


def _below(snapshot: BoardSnapshot, dropped: Sequence[_Column], width: int) -> list[str]:
    """Return what the table does not show: totals, remaining time, dropped columns."""
    remarks = list(snapshot.remarks)
    state = [column for column in dropped if column.title == "state"]
    if state:
        remarks.append(f"all {state[0].cells[0]}")
    names = [column.title for column in dropped if column.title != "state"]
    if names:
        remarks.append(f"no room for {', '.join(names)}")
    lines = textwrap.wrap("; ".join(remarks), max(width, 20), break_long_words=True)
    if len(lines) > _MAX_LINES_BELOW:
        lines[_MAX_LINES_BELOW - 1 :] = [
            cut(" ".join(lines[_MAX_LINES_BELOW - 1 :]), max(width, 20))
        ]
    return lines
