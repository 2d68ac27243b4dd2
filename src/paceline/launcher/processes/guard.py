"""The launcher's side of the guard process (guard_main.py), which ends a job's leftover processes.

The launcher holds one end of the guard's pipe while the job runs. The guard acts when that end
closes without the line "end".
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launcher.processes import guard_main


class Sessions:
    """The sessions of a job's processes, which end with the job. A detached job has no guard."""

    pid: int | None = None  # of the guard process

    def __init__(self) -> None:
        self.sessions: list[int] = []

    def watch(self, session: int) -> None:
        """Add the session of a process."""
        self.sessions.append(session)

    def forget(self, session: int) -> None:
        """Remove a session that has ended: the kernel may reuse its number."""
        self.sessions.remove(session)

    def end(self) -> None:
        """Note that everything is cleaned up."""


class Guard(Sessions):
    """The guard process and the pipe to it.

    `stopped_s`: if this process is stopped for so long, the guard kills it; 0: it may be stopped.
    """

    def __init__(self, job_id: str, job_directory: Path, *, stopped_s: int = 0) -> None:
        super().__init__()
        command = [sys.executable, "-I", "-S", guard_main.__file__, job_id, str(job_directory)]
        command.append(str(stopped_s))
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
        self.pid = self._popen.pid

    def watch(self, session: int) -> None:
        super().watch(session)
        self._send(f"session {session}\n")

    def forget(self, session: int) -> None:
        super().forget(session)
        self._send(f"forget {session}\n")

    def end(self) -> None:
        """Notify the guard that everything is cleaned up, and reap it."""
        self._send("end\n")
        self.close_in_child()
        try:
            self._popen.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def close_in_child(self) -> None:
        """Close this end of the pipe. A forked child must: the guard has to see the end of it."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def _send(self, line: str) -> None:
        assert self._popen.stdin is not None
        # If the guard was killed, the processes still die with the launcher: the job continues.
        with suppress(BrokenPipeError):
            self._popen.stdin.write(line.encode())
