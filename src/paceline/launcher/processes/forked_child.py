"""A child of the launcher that the template has forked and that is no rank: the coordinator, or
another template. It has what `subprocess.Popen` has for a child that this process started."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

_POLL_S = 0.002


class ForkedChild:
    """A child by its pid. It stays a zombie, so that its pid is not reused, until `poll` or `wait`
    has returned its exit code."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # as of subprocess.Popen: -N if signal N ended it

    def poll(self) -> int | None:
        """Return how it ended; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Kill it, if it still runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it has ended; return its exit code. For one that was killed."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_S)
        return code
