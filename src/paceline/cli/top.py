"""`paceline top`: the live table of a running job, in another terminal than the job's own.

It subscribes to the coordinator as any operator may; the job does not notice. It does not know what
was reported before: a loss value appears with its next report.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from paceline.cli.job_commands import operating
from paceline.launcher.job_directory import is_held
from paceline.launcher.job_registry import FoundJob, find_job
from paceline.observe.display.board import BoardSnapshot
from paceline.observe.display.display import can_move_cursor
from paceline.observe.display.lines import printable
from paceline.observe.display.remote_board import RemoteBoard
from paceline.observe.display.screen import LiveScreen, PlainScreen, Screen
from paceline.observe.display.table import table_lines
from paceline.observe.telemetry.events import RunEnded
from paceline.observe.telemetry.file_formats import EVENTS_FILE, last_line
from paceline.runtime.config import inherited_environ
from paceline.runtime.machine import process_start

if TYPE_CHECKING:
    from collections.abc import Callable

_ONCE_S = 1.2  # ranks report five times a second, a rate needs two reports
_POLL_S = 0.5  # whether the job still runs
_MAX_ROWS = 1000
_RECORD_S = 2.0  # for the launcher to write how the job ended


def top(name: str | None, *, once: bool) -> int:
    """Show a job until it ends, or the user presses q or Ctrl-C."""
    found = find_job(name, inherited_environ())
    watched = RemoteBoard()
    with operating(found, watched.on_notification) as operator:
        watched.take(operator.status())
        if once:
            time.sleep(_ONCE_S)
            _screen(is_live=False).summary(lambda width, _: _table(watched.snapshot(), width))
            return 0
        return _watch(found, watched)


def _watch(found: FoundJob, watched: RemoteBoard) -> int:
    is_live = can_move_cursor() and sys.stdout.isatty()
    screen, job = _screen(is_live=is_live), found.facts
    screen.say(f"paceline: job {job.name}: {printable(job.command.encode())}")
    try:
        with _keys() as pressed:
            has_ended = _follow(found, watched, screen, pressed)
    except KeyboardInterrupt:
        has_ended = False
    finally:
        screen.close()
    if is_live:
        screen.summary(lambda width, _: _table(watched.snapshot(), width))
    if has_ended:
        screen.say(f"paceline: job {job.name} has ended: {_how(found, watched)}")
    else:
        screen.say(f"paceline: no longer watching; job {job.name} continues")
    screen.settle()
    return 0


def _follow(
    found: FoundJob, watched: RemoteBoard, screen: Screen, pressed: Callable[[float], str]
) -> bool:
    """Paint until the job has ended (true), or the user leaves."""
    painted_s = time.monotonic() - screen.every_s
    while True:
        now_s = time.monotonic()
        if now_s - painted_s >= screen.every_s and watched.has_progress:
            painted_s = now_s
            screen.progress(watched.snapshot())
            screen.settle()
        if screen.is_gone or pressed(min(_POLL_S, screen.every_s)) in ("q", "Q"):
            return False
        if not _is_running(found):
            return True


def _is_running(found: FoundJob) -> bool:
    try:
        return is_held(found.directory)
    except OSError:  # the directory is removed with the job
        return False


def _how(found: FoundJob, watched: RemoteBoard) -> str:
    """Return how a job ended: the launcher's closing line, if it keeps a record."""
    facts = found.facts
    record = Path(facts.log_dir) / EVENTS_FILE if facts.log_dir else None
    deadline_s = time.monotonic() + _RECORD_S
    while record is not None and record.exists():
        line = last_line(record)
        if line is not None and isinstance(line.event, RunEnded) and line.event.words:
            return line.event.words.removeprefix("paceline: ")
        if time.monotonic() > deadline_s or process_start(facts.supervisor) is None:
            break
        time.sleep(0.05)
    return printable(watched.describe_end().encode())


def _table(picture: BoardSnapshot, width: int) -> list[str]:
    return table_lines(picture, width, limit=_MAX_ROWS)


def _screen(*, is_live: bool) -> Screen:
    """Return a screen on standard output."""
    if is_live:
        return LiveScreen(1, has_colours=not inherited_environ().get("NO_COLOR"))
    return PlainScreen(1, 1)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits at most so many seconds for a key; "" if none was pressed."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)  # restore the terminal then too
    is_ours = sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpgrp()
    saved = termios.tcgetattr(0) if is_ours else None
    listened = [0] if is_ours else []

    def pressed(within_s: float) -> str:
        ready, _, _ = select.select(listened, [], [], within_s)
        if not ready:
            return ""
        key = os.read(0, 1)
        if not key:
            listened.clear()  # the terminal is gone
        return key.decode(errors="replace")

    try:
        if is_ours:
            tty.setcbreak(0)
        yield pressed
    finally:
        if saved is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, saved)
        signal.signal(signal.SIGTERM, before)
