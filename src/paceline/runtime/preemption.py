"""Stopping together: SIGTERM on any worker becomes the same last step on all of them.

A script that asks `pl.should_stop()` after its steps is not ended by the first SIGTERM. The request
travels with the next exchange, so that all workers hear of it behind the same step, and the script
can save what it wants and leave. A second SIGTERM ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

PREEMPTED = 75  # exit code (EX_TEMPFAIL) of who has saved: started again, it goes on


class Stopping:
    """Whether this process was asked to stop, and whether all have agreed to. Main thread."""

    def __init__(self) -> None:
        self.is_asked = self._is_agreed = self._listens = False

    def is_wanted(self) -> bool:
        """Whether this process has been asked to stop."""
        return self.is_asked

    def hear(self, is_agreed: bool) -> None:
        """Take note, behind a step, whether anybody has been asked; alike on all workers."""
        self._is_agreed = self._is_agreed or is_agreed

    def should_stop(self, *, alone: bool) -> bool:
        """Say whether to stop behind the step that was just done; from now on SIGTERM only asks."""
        if not self._listens and threading.current_thread() is threading.main_thread():
            self._listens = True
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._on_term)
        return self._is_agreed or (alone and self.is_asked)

    def _on_term(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.is_asked:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.is_asked = True
