"""What one rank prints, on its way from the pipe to the display, the log file and the report.

Reads are non-blocking and happen in the launcher's loop. While the display is behind, the pipe is
simply not read; the rank then waits in its own write. A file tells nobody when it grows: it is
looked at several times a second, and has ended when its process has.
"""

from __future__ import annotations

import asyncio
import os

from paceline.launcher.hang import StackBlocks
from paceline.launcher.processes.process import RankProcess
from paceline.observe.display.display import Display
from paceline.observe.display.lines import LineSplitter

_READ_BYTES = 1 << 16
_RETRY_S = 0.05
_HOLD_S = 0.3  # how long a half-read block of stacks is held back; see stacks.py
_KEEP_CHARACTERS = 400  # for the report, not for the screen or the log


class RankOutput:
    """Both output streams of one rank; `done` is set when both have ended."""

    def __init__(self, process: RankProcess, display: Display) -> None:
        self._seat = process.seat
        self._display = display
        self._splitters: dict[int, LineSplitter] = {}
        self._process = process
        self._stderr_fd = process.outlet.stderr_fd
        self._stacks = StackBlocks()
        self.done = asyncio.Event()
        for fd in {process.outlet.stdout_fd, process.outlet.stderr_fd}:
            self._splitters[fd] = LineSplitter()
            self._resume(fd)

    def close(self) -> None:
        """Take what is in the pipes now and stop reading; something else may hold their far end."""
        for fd in list(self._splitters):
            while self._read(fd):
                pass
            self._end(fd)

    def _resume(self, fd: int) -> None:
        if fd not in self._splitters:
            return
        if self._process.outlet.is_file:
            self._follow(fd)
        else:
            asyncio.get_running_loop().add_reader(fd, self._on_readable, fd)

    def _follow(self, fd: int) -> None:
        is_last = not self._process.is_running
        while not self._display.is_behind and self._read(fd):
            pass
        if is_last and not self._display.is_behind:
            self._end(fd)
        else:
            asyncio.get_running_loop().call_later(_RETRY_S, self._resume, fd)

    def _on_readable(self, fd: int) -> None:
        if self._display.is_behind:
            loop = asyncio.get_running_loop()
            loop.remove_reader(fd)
            loop.call_later(_RETRY_S, self._resume, fd)
        else:
            self._read(fd)

    def _read(self, fd: int) -> bool:
        """Take one piece; false when there is nothing more to take now."""
        if fd not in self._splitters:
            return False
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            if not self._process.outlet.is_file:
                self._end(fd)
            return False
        if not self._process.outlet.is_file:  # else it is there already
            self._display.log(self._seat, data)
        for line in self._splitters[fd].feed(data):
            self._show(fd, line)
        return True

    def _end(self, fd: int) -> None:
        splitter = self._splitters.pop(fd, None)
        if splitter is None:
            return
        if not self._process.outlet.is_file:
            asyncio.get_running_loop().remove_reader(fd)
        for line in splitter.finish():
            self._show(fd, line)
        self._let_go(self._stderr_fd)
        if not self._splitters:
            self.done.set()

    def _show(self, fd: int, line: str) -> None:
        if fd != self._stderr_fd or not self._process.was_asked_for_stacks:
            self._put(fd, line)
            return
        for shown in self._stacks.feed(line):
            self._put(fd, shown)
        if self._stacks.is_holding:
            asyncio.get_running_loop().call_later(_HOLD_S, self._let_go, fd)

    def _let_go(self, fd: int) -> None:
        """Show the end of what was held back: nothing has come behind it."""
        for line in self._stacks.finish():
            self._put(fd, line)

    def _put(self, fd: int, line: str) -> None:
        is_error = fd == self._stderr_fd
        if is_error:
            self._process.stderr_tail.append(line[:_KEEP_CHARACTERS])
        elif line.strip():
            self._process.last_stdout = line[:_KEEP_CHARACTERS]
        self._display.output_line(self._seat, is_error, line)
