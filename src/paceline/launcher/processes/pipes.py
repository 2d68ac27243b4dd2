"""Where a process writes its output, and where the launcher reads it.

Two pipes when the process ends with its launcher anyway: standard output and errors stay apart, and
a process that writes more than is read has to wait. One file when it outlives its launcher (a
detached job): a pipe without a reader would kill it at its next line.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from paceline.errors import LaunchError


class Outlet:
    """The near ends are ours to read; the far ones are passed to a process, then closed here."""

    def __init__(self, stdout: tuple[int, int], stderr: tuple[int, int], *, is_file: bool) -> None:
        self.stdout_fd, self.far_stdout = stdout
        self.stderr_fd, self.far_stderr = stderr
        self.is_file = is_file

    @classmethod
    def pipes(cls) -> Outlet:
        """Make two pipes; LaunchError when descriptors have run out."""
        made: list[tuple[int, int]] = []
        try:
            for _ in range(2):
                made.append(os.pipe())
                os.set_blocking(made[-1][0], False)
        except OSError as error:
            for fd in (fd for pair in made for fd in pair):
                os.close(fd)
            raise LaunchError(
                f"no pipe for the output of a process: {error.strerror}; raise the limit of open"
                " files (ulimit -n)"
            ) from error
        return cls(made[0], made[1], is_file=False)

    @classmethod
    def file(cls, path: Path) -> Outlet:
        """Append to a file, and read from its present end; LaunchError when that cannot be."""
        try:
            far = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            near = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise LaunchError(
                f"{path}: {error.strerror}; name a directory you can write to with --log-dir"
            ) from error
        os.lseek(near, 0, os.SEEK_END)
        return cls((near, far), (near, far), is_file=True)

    def close_far(self) -> None:
        """Close what the process has; its end of the pipe must be the only one."""
        self._close(self.far_stdout, self.far_stderr)
        self.far_stdout = self.far_stderr = -1

    def close(self) -> None:
        self.close_far()
        self._close(self.stdout_fd, self.stderr_fd)
        self.stdout_fd = self.stderr_fd = -1

    def _close(self, *fds: int) -> None:
        for fd in {fd for fd in fds if fd >= 0}:
            with suppress(OSError):
                os.close(fd)
