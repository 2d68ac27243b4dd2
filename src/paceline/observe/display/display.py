"""The display: the only thread that writes to the terminal.

Why a thread: a terminal can be stopped (Ctrl-S), and `| less` stops reading. The launcher's main
thread answers heartbeats and Ctrl-C, so it must never wait for the terminal. It puts what is to be
shown into a queue; this thread takes it out and waits as long as it has to. When the queue is full
(`is_behind`) the launcher stops reading from the ranks, and they block in their own writes, as they
would on a pipe.

Threads: the main thread calls the public methods; `_run` is the display thread, the only one that
uses the screen. The recorder (observe/record/) has its own thread.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

from paceline.errors import LaunchError
from paceline.observe.display.board import BoardSnapshot
from paceline.observe.display.screen import LiveScreen, PlainScreen, Screen, Summary
from paceline.observe.record.recorder import RunRecorder
from paceline.observe.telemetry.events import Recorded
from paceline.runtime.config import inherited_environ
from paceline.runtime.process_names import ProcessName

_BACKLOG_LIMIT_BYTES = 4 << 20


def choose_screen() -> Screen:
    """Return a live screen if both streams are a terminal that can move its cursor."""
    if can_move_cursor() and sys.stdout.isatty() and sys.stderr.isatty():
        has_colours = not inherited_environ().get("NO_COLOR")
        return LiveScreen(sys.stderr.fileno(), has_colours=has_colours)
    return PlainScreen()


def can_move_cursor() -> bool:
    """Return whether the terminal can move its cursor; the console of an editor cannot."""
    return inherited_environ().get("TERM") not in ("dumb", "unknown")


class Display:
    """A queue in front of a screen, and of the run's recorder if there is one."""

    def __init__(self, screen: Screen, recorder: RunRecorder | None = None) -> None:
        self._screen = screen
        self._recorder = recorder
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._mu = threading.Lock()
        self._backlog_bytes = 0  # guarded by: _mu
        self._thread = threading.Thread(target=self._run, name="paceline-display", daemon=True)

    @property
    def every_s(self) -> float:
        """How often the screen wants a new snapshot."""
        return self._screen.every_s

    @property
    def is_behind(self) -> bool:
        """True while more output is queued than should be held in memory."""
        if self._recorder is not None and self._recorder.is_behind:
            return True
        with self._mu:
            return self._backlog_bytes > _BACKLOG_LIMIT_BYTES

    def start(self) -> None:
        """Start painting. Call after the ranks were forked: a fork must not see a second thread."""
        if self._thread.ident is not None:
            return  # the job was restarted
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            raise LaunchError(
                f"the job could not be started: {error}; check the process limits with"
                " `paceline doctor`"
            ) from error
        if self._recorder is not None:
            self._recorder.start(self.say)

    def output_line(self, name: ProcessName, is_error: bool, text: str) -> None:
        """Show one line of a process."""
        self._put(len(text), lambda: self._screen.output_line(name, is_error, text))

    def log(self, name: ProcessName, data: bytes) -> None:
        """Keep the raw bytes of a process in its log file, if there is one."""
        if self._recorder is not None:
            self._recorder.output(name, data)

    def record(self, event: Recorded) -> None:
        """Keep an event in the record of the run, if there is one."""
        if self._recorder is not None:
            self._recorder.record(event)

    def say(self, text: str) -> None:
        """Show a line of the launcher; at once if nothing is painted yet: it may wait for hosts."""
        self._put(len(text), lambda: self._screen.say(text))
        while self._thread.ident is None and not self._queue.empty():
            self._paint(self._queue.get())

    def progress(self, snapshot: BoardSnapshot) -> None:
        """Show the board of a running job; dropped while the screen is busy."""
        if self._queue.qsize() < 1000:
            self._put(0, lambda: self._screen.progress(snapshot))

    def summary(self, summary: Summary) -> None:
        """Show the closing summary."""
        self._put(0, lambda: self._screen.summary(summary))

    def close(self, *, timeout_s: float | None) -> bool:
        """Paint what is queued and stop; return False if the screen took longer than the timeout.

        None waits as long as the reader takes. After False, or after an exception such as
        KeyboardInterrupt, the thread may still be blocked in a write: exit with os._exit.
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
            self._paint(item)

    def _paint(self, item: tuple[int, Callable[[], None]] | None) -> None:
        assert item is not None, "only `close` ends the queue"
        size_bytes, paint = item
        try:
            paint()
            if self._queue.empty():
                self._screen.settle()
        except Exception as error:  # an error of the display must not end the job, nor lose output
            self._screen = PlainScreen()
            self._screen.say(
                f"paceline: the display failed: {error!r}; continuing with plain lines"
            )
        with self._mu:
            self._backlog_bytes -= size_bytes
