"""The coordinator as a child process that may die: it is started again in place, from its journal.

The launcher makes the listening socket and keeps it, so the address outlives the coordinator: who
connects while nobody serves waits in the socket's queue for the next one. A coordinator that cannot
even start is not started for ever.

Threads: used in the launcher's loop only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from paceline.cluster.sockets import join_address, listen_tcp
from paceline.errors import LaunchError
from paceline.launcher.lines import LineSplitter
from paceline.launcher.process import ExitStatus, die_with

PROGRAM = "paceline.coordinate"
_READ_BYTES = 1 << 16
# So many ends within this time are no accident.
_MOST_ENDS, _WITHIN_S = 5, 10.0


class Coordination:
    """One coordinator at a time, at one address. `say` shows a line."""

    def __init__(self, host: str, port: int, say: Callable[[str], None]) -> None:
        listener = listen_tcp(host, port)
        self.address = join_address(host, listener.getsockname()[1])
        # A copy: sockets made by the control plane are closed in children, which this is for.
        self._fd = os.dup(listener.fileno())
        listener.close()
        self._say = say
        self._popen: subprocess.Popen[bytes] | None = None
        self._ends: deque[float] = deque(maxlen=_MOST_ENDS)
        self._arguments: list[str] = []
        self._environ: dict[str, str] = {}

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def start(self, arguments: list[str], environ: Mapping[str, str]) -> None:
        """Start it with these arguments, and again with the same whenever it ends."""
        self._arguments, self._environ = arguments, dict(environ)
        self._start()

    def _start(self) -> None:
        launcher = os.getpid()
        # `python -m` would look into the working directory first: not for this program.
        environ = {**self._environ, "PYTHONSAFEPATH": "1"}
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *self._arguments, str(self._fd)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(self._fd,),
                start_new_session=True,
                preexec_fn=lambda: die_with(launcher),
                bufsize=0,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(
                f"the coordinator could not be started: {error}; check the limits with `paceline"
                " doctor` (processes, open files, memory)"
            ) from error
        assert self._popen.stderr is not None
        os.set_blocking(self._popen.stderr.fileno(), False)
        self._read_from(self._popen)

    def _read_from(self, popen: subprocess.Popen[bytes]) -> None:
        loop, splitter = asyncio.get_running_loop(), LineSplitter()
        assert popen.stderr is not None
        fd, pipe = popen.stderr.fileno(), popen.stderr

        def on_readable() -> None:
            with suppress(BlockingIOError):
                data = os.read(fd, _READ_BYTES)
                for line in splitter.feed(data) if data else splitter.finish():
                    self._say(line)
                if not data:
                    loop.remove_reader(fd)
                    pipe.close()

        loop.add_reader(fd, on_readable)

    def look(self) -> None:
        """Start it again if it has ended; LaunchError when it keeps ending."""
        if self._popen is None or self._popen.poll() is None:
            return
        code = self._popen.returncode
        how = ExitStatus(code) if code >= 0 else ExitStatus(None, -code)
        now_s = time.monotonic()
        if how.signal != signal.SIGKILL:  # else somebody killed it, which says nothing about it
            self._ends.append(now_s)
        if len(self._ends) == _MOST_ENDS and now_s - self._ends[0] < _WITHIN_S:
            self._popen = None
            raise LaunchError(
                f"the coordinator ended {_MOST_ENDS} times within {now_s - self._ends[0]:.1f} s,"
                f" last with {how}; the job is ended"
            )
        self._start()
        self._say(f"the coordinator ended ({how}) and was started again in its place")

    def end(self) -> None:
        """End it for good; its address is free again."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            if self._popen.stderr is not None and not self._popen.stderr.closed:
                asyncio.get_running_loop().remove_reader(self._popen.stderr.fileno())
                self._popen.stderr.close()
            self._popen = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
