"""What the launcher holds for the whole life of a job: the guard's pipe and the job's port.

The guard (guard.py) watches the far end of the pipe. The port is for scripts that open torch's own
store at MASTER_PORT: a free number that is merely looked up can be taken by another job a moment
later, so the launcher keeps a socket bound to it. SO_REUSEADDR on both sides lets the script listen
there all the same, while the kernel gives the number to nobody who asks for any free one.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launcher.processes import guard as guard_program


class Sessions:
    """The sessions of a job's processes, for its end; without a guard: the job is detached."""

    def __init__(self) -> None:
        self.sessions: list[int] = []

    def watch(self, session: int) -> None:
        """Take in a process's session."""
        self.sessions.append(session)

    def forget(self, session: int) -> None:
        """Let go of a session that has ended: its number may be a stranger's soon."""
        self.sessions.remove(session)

    def end(self) -> None:
        """Say that everything is cleaned up."""


class Guard(Sessions):
    """The launcher's side of the guard process."""

    def __init__(self, job_id: str, job_directory: Path) -> None:
        super().__init__()
        command = [sys.executable, "-I", "-S", guard_program.__file__, job_id, str(job_directory)]
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                bufsize=0,
            )
        except OSError as error:
            raise LaunchError(
                f"the guard process could not be started: {error.strerror}; check the limits with"
                " `paceline doctor` (processes, open files, memory)"
            ) from error

    @property
    def pid(self) -> int:
        return self._popen.pid

    def watch(self, session: int) -> None:
        """Put a rank's session under guard."""
        super().watch(session)
        self._tell(f"session {session}\n")

    def forget(self, session: int) -> None:
        super().forget(session)
        self._tell(f"forget {session}\n")

    def end(self) -> None:
        """Tell the guard that everything is cleaned up, and reap it."""
        self._tell("end\n")
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def let_go(self) -> None:
        """In a forked child: the pipe is the launcher's alone, its end must be seen."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        # Somebody killed the guard: the ranks still die with the launcher, so the job goes on.
        with suppress(BrokenPipeError):
            self._popen.stdin.write(line.encode())


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """Bind a free port without listening; close the socket at the end of the job."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held
