"""Two ways to paint a job: a live table on a terminal, plain lines anywhere else.

Both are used by the display thread only. Lines of ranks go where the rank wrote them (standard
output or error); what the launcher itself has to say goes to standard error, so that the output of
`paceline run ... > file` is the output of the script. On a terminal both are the same screen.

The live table stands below everything else: whatever is printed first takes it away, and it is
painted again when nothing more waits to be printed (`settle`), all in one write. It is not painted
when it looks as it did.
"""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from paceline.observe.display.board import Picture
from paceline.observe.display.table import table_lines
from paceline.runtime.formatting import width_of
from paceline.runtime.process_names import ProcessName

PLAIN_EVERY_S = 4.0
LIVE_EVERY_S = 0.5
_PLAIN_WIDTH = 160  # no terminal to fit: room for every column
_MOST_BUFFERED = 1 << 16  # characters
_COLOURS = (36, 32, 35, 33, 34, 96, 92)
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

# The lines of the summary, for a screen of so many columns and lines; None: it has no end.
Summary: TypeAlias = Callable[[int, int | None], Sequence[str]]


class Screen(Protocol):
    """Where the display thread paints."""

    every_s: float

    @property
    def is_gone(self) -> bool: ...
    def output_line(self, name: ProcessName, is_error: bool, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def progress(self, picture: Picture) -> None: ...
    def summary(self, summary: Summary) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None: ...


class PlainScreen:
    """Unbuffered lines on two descriptors: safe to abandon when the reader has stopped reading."""

    every_s = PLAIN_EVERY_S

    def __init__(self, stdout_fd: int = 1, stderr_fd: int = 2) -> None:
        self._fds = {False: stdout_fd, True: stderr_fd}
        self._closed: set[bool] = set()
        self._line = ""

    @property
    def is_gone(self) -> bool:
        """Whether there is no reader any more for what is said."""
        return True in self._closed

    def output_line(self, name: ProcessName, is_error: bool, text: str) -> None:
        self._write(is_error, f"[{name.label}] {text}\n")

    def say(self, text: str) -> None:
        self._write(True, text + "\n")

    def progress(self, picture: Picture) -> None:
        if picture.line != self._line:
            self._line = picture.line
            self.say(f"paceline: {picture.line}")

    def summary(self, summary: Summary) -> None:
        for line in summary(_PLAIN_WIDTH, None):
            self.say(line)

    def settle(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to restore."""

    def _write(self, is_error: bool, text: str) -> None:
        if is_error in self._closed:
            return
        try:
            write_all(self._fds[is_error], text)
        except OSError as error:
            # The reader went away (`| head`) or its disk is full. The job is worth more than the
            # picture of it: say so once, if there is still somewhere to say it, and go on.
            self._closed.add(is_error)
            if not is_error:
                self.say(f"paceline: standard output: {error.strerror}; the job goes on without it")


class LiveScreen:
    """A table under the scrolling lines of the ranks. A terminal that is gone is written to no
    more; the job goes on."""

    every_s = LIVE_EVERY_S

    def __init__(self, fd: int = 2, *, has_colours: bool = True) -> None:
        self._fd = fd
        self._has_colours = has_colours
        self._waiting: list[str] = []  # to be printed above the table
        self._num_waiting = 0  # characters
        self._table: list[str] = []  # as it should be
        self._painted: list[str] = []  # as it stands on the screen
        self.is_gone = False

    def output_line(self, name: ProcessName, is_error: bool, text: str) -> None:
        del is_error  # one screen: the order of arrival is all that can be shown
        colour = f"\x1b[{_COLOURS[name.rank % len(_COLOURS)]}m"
        end = _PLAIN if "\x1b" in text else ""
        self._print(f"{self._styled(colour, f'[{name.label}] ')}{text}{end}")

    def say(self, text: str) -> None:
        self._print(self._styled(_BOLD, text))

    def progress(self, picture: Picture) -> None:
        columns, height = self._size()
        # A line less than there is: one that ends in the last column would be followed by another.
        self._table = table_lines(picture, columns - 1, limit=max(1, height - 6))

    def summary(self, summary: Summary) -> None:
        columns, height = self._size()
        self.close()
        for line in summary(columns - 1, height):
            self._print(line)
        self.settle()

    def settle(self) -> None:
        """Bring the screen up to date; called when nothing more waits to be painted."""
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
        """Take the table away, and give the cursor back."""
        self._table = []
        self.settle()

    def _print(self, line: str) -> None:
        self._waiting.append(line + "\n")
        self._num_waiting += len(line)
        if self._num_waiting > _MOST_BUFFERED:
            self.settle()

    def _erasure(self) -> str:
        """Return what takes the table away; its lines may have been broken since by a narrower
        terminal."""
        if not self._painted:
            return ""
        columns = max(self._size()[0], 1)
        lines = sum(max(1, -(-width_of(line) // columns)) for line in self._painted)
        return f"\r\x1b[{lines}A\x1b[J"

    def _styled(self, style: str, text: str) -> str:
        return f"{style}{text}{_PLAIN}" if self._has_colours else text

    def _size(self) -> tuple[int, int]:
        """Return columns and lines; COLUMNS and LINES win, as everywhere."""
        columns, lines = shutil.get_terminal_size()
        return max(columns, 20), max(lines, 8)


def write_all(fd: int, text: str) -> None:
    """Write, however long the reader takes; OSError when it is gone."""
    data = text.encode("utf-8", errors="backslashreplace")
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # noqa: PERF203 - whoever shares the terminal does not wait
            select.select([], [fd], [])
