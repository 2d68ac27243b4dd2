"""Two ways to paint a job: a live table on a terminal, plain lines anywhere else.

Both are used by the display thread only. Lines of ranks go where the rank wrote them (standard
output or error); what the launcher itself has to say goes to standard error, so that the output of
`paceline run ... > file` is the output of the script. On a terminal both are the same screen and
one rich console paints everything, because a table that redraws itself and a second writer would
tear each other apart.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Protocol

from paceline.launcher.board import SHARES, Row, cell, number
from paceline.launcher.seat import Seat

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
PLAIN_EVERY_S = 4.0
LIVE_EVERY_S = 0.25
_PLAIN_WIDTH = 160  # no terminal to fit: room for every column
_MEASURING_WIDTH = 10_000


@dataclass(frozen=True)
class Picture:
    """The board at one moment, in both forms."""

    columns: tuple[str, ...]
    rows: Sequence[Row]
    line: str


class Screen(Protocol):
    """Where the display thread paints."""

    every_s: float

    def output_line(self, seat: Seat, is_error: bool, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def progress(self, picture: Picture) -> None: ...
    def summary(self, picture: Picture) -> None: ...
    def close(self) -> None: ...


class PlainScreen:
    """Unbuffered lines on two descriptors: safe to abandon when the reader has stopped reading."""

    every_s = PLAIN_EVERY_S

    def __init__(self, stdout_fd: int = 1, stderr_fd: int = 2) -> None:
        self._fds = {False: stdout_fd, True: stderr_fd}
        self._closed: set[bool] = set()

    def output_line(self, seat: Seat, is_error: bool, text: str) -> None:
        self._write(is_error, f"[{seat.label}] {text}\n")

    def say(self, text: str) -> None:
        self._write(True, text + "\n")

    def progress(self, picture: Picture) -> None:
        self.say(f"paceline: {picture.line}")

    def summary(self, picture: Picture) -> None:
        from rich.console import Console

        console = Console(width=_PLAIN_WIDTH, color_system=None, markup=False, emoji=False)
        with console.capture() as capture:
            console.print(fitted_table(picture, console, limit=18))
        lines = capture.get().splitlines()
        self.say("\n".join(line.rstrip() for line in lines if line.strip()))

    def close(self) -> None:
        """Nothing to restore."""

    def _write(self, is_error: bool, text: str) -> None:
        if is_error in self._closed:
            return
        data = text.encode("utf-8", errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._fds[is_error], data) :]
        except OSError as error:
            # The reader went away (`| head`) or its disk is full. The job is worth more than the
            # picture of it: say so once, if there is still somewhere to say it, and go on.
            self._closed.add(is_error)
            if not is_error:
                self.say(f"paceline: standard output: {error.strerror}; the job goes on without it")


class LiveScreen:
    """A table under the scrolling lines of the ranks."""

    every_s = LIVE_EVERY_S

    def __init__(self, file: IO[str]) -> None:
        from rich.console import Console

        # Markup and emoji off: "[0]" and ":x:" in what ranks say are just that.
        self._console: Console = Console(
            file=file, highlight=False, soft_wrap=True, markup=False, emoji=False
        )
        self._live: Live | None = None

    def output_line(self, seat: Seat, is_error: bool, text: str) -> None:
        from rich.text import Text

        del is_error  # one screen: the order of arrival is all that can be shown
        prefix = (f"[{seat.label}] ", _COLOURS[seat.rank % len(_COLOURS)])
        self._console.print(Text.assemble(prefix, Text.from_ansi(text)))

    def say(self, text: str) -> None:
        self._console.print(text, style="bold")

    def progress(self, picture: Picture) -> None:
        table = self._table(picture)
        if self._live is None:
            from rich.live import Live

            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(table, refresh=True)

    def summary(self, picture: Picture) -> None:
        self.close()
        self._console.print(self._table(picture))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, picture: Picture) -> Table:
        return fitted_table(picture, self._console, limit=max(3, self._console.size.height - 8))


def fitted_table(picture: Picture, console: Console, *, limit: int) -> Table:
    """Paint what fits: numbers are not cut, a value whose column had to go is named below.

    The script's first value (a loss, mostly) goes last, the shares before it.
    """
    columns = picture.columns
    droppable = sorted(columns[:0:-1], key=lambda name: name in SHARES)
    unlimited = console.options.update(max_width=_MEASURING_WIDTH)
    table = _whole_table(picture, columns, limit)
    while droppable and console.measure(table, options=unlimited).maximum > console.width:
        dropped = droppable.pop(0)
        columns = tuple(name for name in columns if name != dropped)
        table = _whole_table(picture, columns, limit)
    if columns != picture.columns:
        left_out = [name for name in picture.columns if name not in columns]
        table.caption, table.caption_justify = f"no room for {', '.join(left_out)}", "left"
    return table


def _whole_table(picture: Picture, columns: Sequence[str], limit: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "step", "steps/s", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    shown = picture.rows[: limit - 1] if len(picture.rows) > limit else picture.rows
    for row in shown:
        table.add_row(*_cells(row, columns))
    if len(shown) < len(picture.rows):
        table.add_row("...", "", *[""] * (len(columns) + 1), _rest(picture, len(shown)))
    return table


def _cells(row: Row, columns: Sequence[str]) -> list[str]:
    values = [cell(name, row.values[name]) if name in row.values else "-" for name in columns]
    step = "-" if row.step is None else str(row.step)
    rate = "-" if row.steps_per_s is None else number(row.steps_per_s)
    return [row.label, step, rate, *values, row.state]


def _rest(picture: Picture, shown: int) -> str:
    states: dict[str, int] = {}
    for row in picture.rows[shown:]:
        states[row.state] = states.get(row.state, 0) + 1
    return ", ".join(f"{count} more {state}" for state, count in list(states.items())[:3])
