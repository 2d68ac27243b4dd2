"""The job directory: a private directory (0700) for the job's secret while the job runs.

It lies under XDG_RUNTIME_DIR or the temporary directory and has an unpredictable name made by
mkdtemp, so another user of the host can neither read it nor prepare it. The launcher holds a lock
on a file inside; the kernel drops the lock when the launcher dies, however it dies. So a directory
whose lock can be taken belongs to a dead launcher, and the next launcher removes it. This needs no
pid files and no guesses about reused pids. One exception: a detached job outlives its supervisor,
so its directory (which `keep` marks) stays while any process of the job is alive.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from types import TracebackType

from paceline.control.transport.auth import write_private
from paceline.errors import LaunchError
from paceline.launcher.processes.guard_main import job_processes

# A directory is created under the first name, locked, and only then renamed to the second, so
# another launcher that sweeps never sees an unlocked directory in use under the second name.
_NEW, _READY = "new", "job"
_KEPT = "detached"
_CREATION_S = 60.0
_ROOM_BYTES = 64 << 10  # for what a job writes there


def _prefix(stage: str) -> str:
    return f"paceline-{os.getuid()}-{stage}-"


class JobDirectory:
    """A directory that exists as long as its launcher; use as a context manager."""

    def __init__(self, base: Path) -> None:
        sweep(base)
        try:
            born = Path(tempfile.mkdtemp(prefix=_prefix(_NEW), dir=base))
            self._lock_fd = os.open(born / "lock", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._lock_fd, 0, _ROOM_BYTES)  # fails here if the disk is full
            os.ftruncate(self._lock_fd, 0)
            self.path = base / born.name.replace(_prefix(_NEW), _prefix(_READY), 1)
            born.rename(self.path)
        except OSError as error:
            raise LaunchError(
                f"cannot create a job directory in {base}: {error.strerror}; free some space or set"
                " XDG_RUNTIME_DIR to a directory you can write to"
            ) from error

    def __enter__(self) -> JobDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # the next launcher sweeps what remains
        os.close(self._lock_fd)

    @classmethod
    def take_over(cls, path: Path) -> JobDirectory:
        """Take the lock of a directory whose launcher has died; raises LaunchError if it lives."""
        taken = cls.__new__(cls)
        taken.path = path
        try:
            taken._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
            fcntl.flock(taken._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LaunchError(f"{path}: the job is supervised already, or gone") from error
        return taken

    def keep(self, job_id: str) -> None:
        """Keep the directory after this process ends, while the job has other processes."""
        write_private(self.path / _KEPT, job_id.encode())


def remove_abandoned(path: Path) -> bool:
    """Remove a directory if no launcher holds it; return whether it was removed."""
    is_abandoned = _is_abandoned(path, _READY)
    if is_abandoned:
        shutil.rmtree(path, ignore_errors=True)
    return is_abandoned


def sweep(base: Path) -> list[Path]:
    """Remove the job directories of this user's dead launchers; return their paths."""
    removed = []
    for stage in (_NEW, _READY):
        for path in base.glob(_prefix(stage) + "*"):
            if _is_abandoned(path, stage):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def directories(base: Path) -> list[Path]:
    """Return the job directories of this user."""
    found = base.glob(_prefix(_READY) + "*")
    return sorted(path for path in found if _is_ours(path))


def _is_ours(path: Path) -> bool:
    """Return whether it is a directory of this user, not a link that another user planted."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def is_held(path: Path) -> bool:
    """Return whether a living launcher holds the lock; raises OSError if there is no lock file."""
    lock_fd = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock_fd)


def _is_kept(path: Path) -> bool:
    try:
        job_id = (path / _KEPT).read_text()
    except OSError:
        return False
    return any(job_processes(job_id, ()))


def _is_abandoned(path: Path, stage: str) -> bool:
    if not _is_ours(path):
        return False
    try:
        if stage == _NEW:
            return time.time() - path.lstat().st_mtime > _CREATION_S
        return not is_held(path) and not _is_kept(path)
    except FileNotFoundError:
        return path.is_dir()  # a launcher was killed while it removed the directory
    except OSError:
        return False
