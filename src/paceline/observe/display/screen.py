"""Two ways to paint a job: a live table on a terminal, plain lines elsewhere.

Only the display thread uses them. Lines of ranks go to the stream that the rank wrote to (standard
output or error); lines of the launcher go to standard error, so that `paceline run ... > file`
contains the output of the script. On a terminal both are the same screen.

The live table stays below everything else. A printed line first removes the table; the table is
painted again when no more lines wait (`settle`), all in one write. An unchanged table is not
painted.
"""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from paceline.observe.display.board import BoardSnapshot
from paceline.observe.display.table import table_lines
from paceline.runtime.formatting import width_of
from paceline.runtime.process_names import ProcessName

PLAIN_EVERY_S = 4.0
LIVE_EVERY_S = 0.5
_PLAIN_WIDTH = 160  # not a terminal: room for every column
_MAX_BUFFERED = 1 << 16  # characters
_COLOURS = (36, 32, 35, 33, 34, 96, 92)
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

# Returns the lines of the summary for a screen of so many columns and lines (None: unlimited).
Summary: TypeAlias = Callable[[int, int | None], Sequence[str]]


class Screen(Protocol):
    """The output of the display thread."""

    every_s: float

    @property
    def is_gone(self) -> bool: ...
    def output_line(self, name: ProcessName, is_error: bool, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def progress(self, snapshot: BoardSnapshot) -> None: ...
    def summary(self, summary: Summary) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None: ...


class PlainScreen:
    """Unbuffered lines on two descriptors: can be abandoned if the reader has stopped reading."""

    every_s = PLAIN_EVERY_S

    def __init__(self, stdout_fd: int = 1, stderr_fd: int = 2) -> None:
        self._fds = {False: stdout_fd, True: stderr_fd}
        self._closed: set[bool] = set()
        self._line = ""

    @property
    def is_gone(self) -> bool:
        """Whether standard error has no reader any more."""
        return True in self._closed

    def output_line(self, name: ProcessName, is_error: bool, text: str) -> None:
        self._write(is_error, f"[{name.label}] {text}\n")

    def say(self, text: str) -> None:
        self._write(True, text + "\n")

    def progress(self, snapshot: BoardSnapshot) -> None:
        if snapshot.line != self._line:
            self._line = snapshot.line
            self.say(f"paceline: {snapshot.line}")

    def summary(self, summary: Summary) -> None:
        for line in summary(_PLAIN_WIDTH, None):
            self.say(line)

    def settle(self) -> None:
        """Do nothing: lines are not buffered."""

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""

    def _write(self, is_error: bool, text: str) -> None:
        if is_error in self._closed:
            return
        try:
            write_all(self._fds[is_error], text)
        except OSError as error:
            # The reader is gone (`| head`) or its disk is full. The job matters more than its
            # output: warn once, if standard error still works, and continue.
            self._closed.add(is_error)
            if not is_error:
                self.say(
                    f"paceline: standard output: {error.strerror}; the job continues without it"
                )


class LiveScreen:
    """A table below the scrolling lines of the ranks. If the terminal is gone, output stops and the
    job continues."""

    every_s = LIVE_EVERY_S

    def __init__(self, fd: int = 2, *, has_colours: bool = True) -> None:
        self._fd = fd
        self._has_colours = has_colours
        self._waiting: list[str] = []  # to be printed above the table
        self._num_waiting = 0  # characters
        self._table: list[str] = []  # to be painted
        self._painted: list[str] = []  # on the screen now
        self.is_gone = False

    def output_line(self, name: ProcessName, is_error: bool, text: str) -> None:
        del is_error  # one screen for both streams, in the order of arrival
        colour = f"\x1b[{_COLOURS[name.rank % len(_COLOURS)]}m"
        end = _PLAIN if "\x1b" in text else ""
        self._print(f"{self._styled(colour, f'[{name.label}] ')}{text}{end}")

    def say(self, text: str) -> None:
        self._print(self._styled(_BOLD, text))

    def progress(self, snapshot: BoardSnapshot) -> None:
        columns, height = self._size()
        # One column less: a line that ends in the last column would wrap.
        self._table = table_lines(snapshot, columns - 1, limit=max(1, height - 6))

    def summary(self, summary: Summary) -> None:
        columns, height = self._size()
        self.close()
        for line in summary(columns - 1, height):
            self._print(line)
        self.settle()

    def settle(self) -> None:
        """Update the screen; called when no more lines wait."""
        if not self._waiting and self._table == self._painted:
            return
        parts = [self._erasure(), *self._waiting]
        if self._table:
            title, *rows = self._table
            hide = "" if self._painted else _HIDE_CURSOR
            parts += [hide, *(f"{line}\n" for line in (self._styled(_BOLD, title), *rows))]
        elif self._painted:
            parts.append(_SHOW_CURSOR)
        self._waiting, self._num_waiting, self._painted = [], 0, list(self._table)
        try:
            if not self.is_gone:
                write_all(self._fd, "".join(parts))
        except OSError:
            self.is_gone = True

    def close(self) -> None:
        """Remove the table and show the cursor."""
        self._table = []
        self.settle()

    def _print(self, line: str) -> None:
        self._waiting.append(line + "\n")
        self._num_waiting += len(line)
        if self._num_waiting > _MAX_BUFFERED:
            self.settle()

    def _erasure(self) -> str:
        """Return the escapes that remove the table; a narrower terminal may have wrapped it."""
        if not self._painted:
            return ""
        columns = max(self._size()[0], 1)
        lines = sum(max(1, -(-width_of(line) // columns)) for line in self._painted)
        return f"\r\x1b[{lines}A\x1b[J"

    def _styled(self, style: str, text: str) -> str:
        return f"{style}{text}{_PLAIN}" if self._has_colours else text

    def _size(self) -> tuple[int, int]:
        """Return columns and lines; COLUMNS and LINES take precedence."""
        columns, lines = shutil.get_terminal_size()
        return max(columns, 20), max(lines, 8)


def write_all(fd: int, text: str) -> None:
    """Write everything, however long the reader takes; OSError if it is gone."""
    data = text.encode("utf-8", errors="backslashreplace")
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # noqa: PERF203 - another program made the terminal non-blocking
            select.select([], [fd], [])
