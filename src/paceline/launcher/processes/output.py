"""Reads what one process prints, and passes it to a sink.

On the launcher's host the sink is `ShownOutput`: the display, the log file and the failure report.
On another host the agent sends the bytes to the launcher, which has a `ShownOutput` for them.

Reads are non-blocking and happen in the loop. While the sink lags, the pipe is not read; the
process then blocks in its own write. A file does not notify its reader: it is read several times a
second, and has ended when its process has.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from paceline.launcher.processes.process import RankProcess
from paceline.observe.display.display import Display
from paceline.observe.display.lines import LineSplitter

_READ_BYTES = 1 << 16
_RETRY_S = 0.05
_HOLD_S = 0.3  # how long a half-read block of stacks is held back
_KEEP_CHARACTERS = 400  # for the report, not for the screen or the log

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_HEAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(.*)", line \d+ in ')
_IDLE = re.compile(r'  File ".*/concurrent/futures/thread.py", line \d+ in _worker$')
# What calls a script in a fork of the template, and what Python itself leaves out.
_CALLERS = re.compile(
    r'  File "(?:<frozen importlib\._bootstrap(?:_external)?>|<string>'
    rf'|{re.escape(_PACKAGE)}launcher/processes/(?:run_script|template_main)\.py)", line \d+ in '
)


class OutputSink(Protocol):
    """Takes the output of one process."""

    @property
    def is_behind(self) -> bool:
        """Whether it lags; then nothing is read for a while."""

    def feed(self, is_error: bool, data: bytes) -> None:
        """Take the next bytes of one stream."""

    def finish(self, is_error: bool) -> None:
        """Note the end of one stream."""


class OutputReader:
    """Both output streams of one process; `done` is set when both have ended."""

    def __init__(self, process: RankProcess, sink: OutputSink) -> None:
        self._process, self._sink = process, sink
        self._stderr_fd = process.output.stderr_fd
        self._open = {process.output.stdout_fd, process.output.stderr_fd}
        self.done = asyncio.Event()
        for fd in set(self._open):
            self._resume(fd)

    def close(self) -> None:
        """Read what is in the pipes now and stop; another process may hold their child end."""
        for fd in list(self._open):
            while self._read(fd):
                pass
            self._end(fd)

    def _resume(self, fd: int) -> None:
        if fd not in self._open:
            return
        if self._process.output.is_file:
            self._follow(fd)
        else:
            asyncio.get_running_loop().add_reader(fd, self._on_readable, fd)

    def _follow(self, fd: int) -> None:
        is_last = not self._process.is_running
        while not self._sink.is_behind and self._read(fd):
            pass
        if is_last and not self._sink.is_behind:
            self._end(fd)
        else:
            asyncio.get_running_loop().call_later(_RETRY_S, self._resume, fd)

    def _on_readable(self, fd: int) -> None:
        if self._sink.is_behind:
            loop = asyncio.get_running_loop()
            loop.remove_reader(fd)
            loop.call_later(_RETRY_S, self._resume, fd)
        else:
            self._read(fd)

    def _read(self, fd: int) -> bool:
        """Read one block; return false if there is nothing more to read now."""
        if fd not in self._open:
            return False
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            if not self._process.output.is_file:
                self._end(fd)
            return False
        self._sink.feed(fd == self._stderr_fd, data)
        return True

    def _end(self, fd: int) -> None:
        if fd not in self._open:
            return
        self._open.discard(fd)
        if not self._process.output.is_file:
            asyncio.get_running_loop().remove_reader(fd)
        self._sink.finish(fd == self._stderr_fd)
        if not self._open:
            self.done.set()


class ShownOutput:
    """Shows the output of one process on the display, and keeps its end for the failure report.

    `log` takes the bytes for the log file; None if the process writes it itself.
    """

    def __init__(
        self, process: RankProcess, display: Display, log: Callable[[bytes], None] | None
    ) -> None:
        self._process, self._name, self._display = process, process.name, display
        self._log = log
        self._splitters = {False: LineSplitter(), True: LineSplitter()}  # by stream
        self._stacks = StackFilter()

    @property
    def is_behind(self) -> bool:
        return self._display.is_behind

    def feed(self, is_error: bool, data: bytes) -> None:
        if self._log is not None:
            self._log(data)
        for line in self._splitters[is_error].feed(data):
            self._show(is_error, line)

    def finish(self, is_error: bool) -> None:
        for line in self._splitters[is_error].finish():
            self._show(is_error, line)
        self._flush_stacks()

    def _show(self, is_error: bool, line: str) -> None:
        if not is_error or not self._process.was_asked_for_stacks:
            self._put(is_error, line)
            return
        for shown in self._stacks.feed(line):
            self._put(True, shown)
        if self._stacks.is_holding:
            asyncio.get_running_loop().call_later(_HOLD_S, self._flush_stacks)

    def _flush_stacks(self) -> None:
        """Show the lines that were held back: no line has followed them."""
        for line in self._stacks.finish():
            self._put(True, line)

    def _put(self, is_error: bool, line: str) -> None:
        if is_error:
            self._process.stderr_tail.append(line[:_KEEP_CHARACTERS])
        elif line.strip():
            self._process.last_stdout = line[:_KEEP_CHARACTERS]
        self._display.output_line(self._name, is_error, line)


class LineForwarder:
    """Passes each line of a pipe to `log`, until the pipe ends or `close` is called."""

    def __init__(self, fd: int, log: Callable[[str], None]) -> None:
        self._pipe, self._log = open(fd, "rb", buffering=0), log  # noqa: SIM115 - closed at its end
        self._splitter = LineSplitter()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._pipe.fileno(), _READ_BYTES):
                self._print(self._splitter.feed(data))
            self._print(self._splitter.finish())
            self._end()

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._log(line)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()

    def close(self) -> None:
        """Pass on what is in the pipe now; another process may hold its other end."""
        if not self._pipe.closed:
            self._read()
        if not self._pipe.closed:
            self._end()


class StackFilter:
    """Removes Paceline's own threads, and the callers of a script, from printed stacks."""

    def __init__(self) -> None:
        self._block: list[str] = []  # held back until its thread is known

    def feed(self, line: str) -> Iterator[str]:
        """Take a line of stderr; yield the lines to show."""
        if _CALLERS.match(line):
            return
        head = _HEAD.match(line)
        if head is not None or (self._block and line and not line.startswith("  ")):
            yield from self.finish()
        if head is not None and head[1] == "Thread" or (self._block and line.startswith("  ")):
            self._block.append(line)
        elif line or not self._block:  # blank lines stand between blocks
            yield line

    @property
    def is_holding(self) -> bool:
        return bool(self._block)

    def finish(self) -> Iterator[str]:
        """End a block; yield it unless its thread is Paceline's, or idle."""
        block, self._block = self._block, []
        if block and not _is_own_thread(block) and not _IDLE.match(block[1] if block[1:] else ""):
            yield from block


def _is_own_thread(block: list[str]) -> bool:
    """Return whether Python started this thread to run a function of Paceline."""
    files = [found[1] for line in block if (found := _FRAME.match(line))]
    outer = [file for file in files if not file.endswith("/threading.py")]
    return files[-1:] != outer[-1:] and bool(outer) and outer[-1].startswith(_PACKAGE)
