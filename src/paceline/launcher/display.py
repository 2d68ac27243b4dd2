"""The display: the one thread that writes to the terminal and to the log files.

Why a thread: a terminal can be held (Ctrl-S), `| less` stops reading, a disk can hang. The
launcher's main thread answers heartbeats and Ctrl-C, so it must never wait for any of those. It
puts what is to be shown into a queue; this thread takes it out and waits as long as it has to. When
the queue is full (`is_behind`) the launcher stops reading from the ranks, and they wait in their
own writes, as they would on a pipe.

Threads: public methods are called by the main thread; everything named `_paint...` runs on the
display thread, which alone owns the screen and the log files.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from paceline.errors import ConfigError, LaunchError
from paceline.launcher.screen import LiveScreen, Picture, PlainScreen, Screen
from paceline.launcher.seat import Seat

_BACKLOG_LIMIT_BYTES = 4 << 20


def choose_screen() -> Screen:
    """Return a live screen when both streams are one terminal, else a plain one."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        return LiveScreen(sys.stderr)
    return PlainScreen()


class Logs:
    """The files of --log-dir, one for each place: a replacement goes on in the same file.

    Made on the main thread, then used by the display thread only.
    """

    def __init__(self, directory: Path, seats: Sequence[Seat]) -> None:
        """Create the files; raises ConfigError when that is not possible."""
        self._directory = directory
        self._files: dict[str, BinaryIO | None] = {}  # None: writing to it has failed
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for seat in seats:
                self._files[seat.log_name] = self._open(seat, "wb")
        except OSError as error:
            raise ConfigError(
                f"--log-dir {directory}: {error.strerror}; name a directory you can write to"
            ) from error

    def _open(self, seat: Seat, mode: str) -> BinaryIO:
        return cast(BinaryIO, open(self._directory / seat.log_name, mode, buffering=0))

    def write(self, seat: Seat, data: bytes) -> str | None:
        """Append; when that fails, say so once, and drop whatever comes later."""
        name = seat.log_name
        try:
            file = self._files[name] if name in self._files else self._open(seat, "ab")
            self._files[name] = file
            while file is not None and data:
                data = data[file.write(data) or 0 :]
        except OSError as error:
            self._close(name)
            return (
                f"paceline: {self._directory / name}: {error.strerror}; the log of {seat} ends"
                " here, the job goes on"
            )
        return None

    def _close(self, name: str) -> None:
        file = self._files.get(name)
        if file is not None:
            file.close()
        self._files[name] = None

    def close(self) -> None:
        for name in list(self._files):
            self._close(name)


class Display:
    """Queue in front of a screen and the log files."""

    def __init__(self, screen: Screen, logs: Logs | None = None) -> None:
        self._screen = screen
        self._logs = logs
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._mu = threading.Lock()
        self._backlog_bytes = 0  # guarded by: _mu
        self._thread = threading.Thread(target=self._run, name="paceline-display", daemon=True)

    @property
    def every_s(self) -> float:
        """How often the screen wants a new picture."""
        return self._screen.every_s

    @property
    def is_behind(self) -> bool:
        """True while there is more to show than should be held in memory."""
        with self._mu:
            return self._backlog_bytes > _BACKLOG_LIMIT_BYTES

    def start(self) -> None:
        """Start painting. Call after the ranks were forked: a fork must not see a second thread."""
        if self._thread.ident is not None:
            return  # the job was started again
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            raise LaunchError(
                f"the job could not be started: {error}; check the limits with `paceline doctor`"
                " (processes)"
            ) from error

    def output_line(self, seat: Seat, is_error: bool, text: str) -> None:
        """Show one line of a process."""
        self._put(len(text), lambda: self._screen.output_line(seat, is_error, text))

    def log(self, seat: Seat, data: bytes) -> None:
        """Keep the raw bytes of a process in its log file, if there is one."""
        if self._logs is not None:
            self._put(len(data), lambda: self._paint_log(seat, data))

    def say(self, text: str) -> None:
        """Show a line of the launcher's own."""
        self._put(len(text), lambda: self._screen.say(text))

    def progress(self, picture: Picture) -> None:
        """Show the board while the job runs; dropped when the screen is busy."""
        if self._queue.qsize() < 1000:
            self._put(0, lambda: self._screen.progress(picture))

    def summary(self, picture: Picture) -> None:
        """Show the board as it is at the end."""
        self._put(0, lambda: self._screen.summary(picture))

    def close(self, *, timeout_s: float | None) -> bool:
        """Paint what is queued and stop; false when the screen did not take it in time.

        None waits for as long as the reader takes. After false, or after an exception such as
        KeyboardInterrupt, the thread may still hang in a write: leave the process with os._exit.
        """
        self._put(0, lambda: self._screen.close())
        self._queue.put(None)
        if self._thread.ident is None:  # never started: the job failed before its first rank
            self._run()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, size_bytes: int, paint: Callable[[], None]) -> None:
        with self._mu:
            self._backlog_bytes += size_bytes
        self._queue.put((size_bytes, paint))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            size_bytes, paint = item
            try:
                paint()
            except Exception as error:  # the picture failed; the job and its words must not
                self._screen = PlainScreen()
                self._screen.say(f"paceline: display: {error!r}; going on with plain lines")
            with self._mu:
                self._backlog_bytes -= size_bytes
        if self._logs is not None:
            self._logs.close()

    def _paint_log(self, seat: Seat, data: bytes) -> None:
        assert self._logs is not None
        trouble = self._logs.write(seat, data)
        if trouble is not None:
            self._screen.say(trouble)
