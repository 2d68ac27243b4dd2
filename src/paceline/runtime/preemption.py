"""Stopping together: SIGTERM on any worker becomes the same last step on all of them.

A script that calls `pl.should_stop()` after its steps is not ended by the first SIGTERM. The
request travels with the next exchange, so that all workers receive it after the same step, and the
script can save a checkpoint and exit. A second SIGTERM ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

PREEMPTED = 75  # exit code (EX_TEMPFAIL) of a process that has saved: started again, it resumes


class Stopping:
    """Whether this process was asked to stop, and whether all workers have agreed. Main thread."""

    def __init__(self) -> None:
        self.is_asked = self._is_agreed = self._listens = False

    def is_wanted(self) -> bool:
        """Whether this process has been asked to stop."""
        return self.is_asked

    def note_agreement(self, is_agreed: bool) -> None:
        """Note after a step whether any worker was asked to stop; the same on all workers."""
        self._is_agreed = self._is_agreed or is_agreed

    def should_stop(self, *, alone: bool) -> bool:
        """Return whether to stop after the last step; from now on SIGTERM is only a request."""
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
