"""The job directory: a private place (0700) for the job's secret while the job runs.

It lies under XDG_RUNTIME_DIR or the temporary directory and has an unpredictable name made by
mkdtemp, so another user of the host can neither read it nor prepare it. The launcher holds a lock
on a file inside; the kernel drops the lock when the launcher dies, however it dies. So a directory
whose lock can be taken belongs to a dead launcher, and the next launcher removes it: no pid files,
no guessing about reused pids.
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

from paceline.errors import LaunchError

# A directory is born under the first name, locked, and only then renamed to the second, so a
# sweeping launcher never sees an unlocked directory of a living one under the second name.
_NEW, _READY = "new", "job"
_BIRTH_S = 60.0


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
            self.path = base / born.name.replace(_prefix(_NEW), _prefix(_READY), 1)
            born.rename(self.path)
        except OSError as error:
            raise LaunchError(
                f"cannot make a job directory in {base}: {error.strerror}; free some space or set"
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
        shutil.rmtree(self.path, ignore_errors=True)  # what remains is swept by the next launcher
        os.close(self._lock_fd)


def sweep(base: Path) -> list[Path]:
    """Remove the job directories of this user's dead launchers; return what was removed."""
    removed = []
    for stage in (_NEW, _READY):
        for path in base.glob(_prefix(stage) + "*"):
            if _is_abandoned(path, stage):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _is_abandoned(path: Path, stage: str) -> bool:
    try:
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            return False  # somebody else's, or a link somebody left for us to follow
        if stage == _NEW:
            return time.time() - info.st_mtime > _BIRTH_S
        lock_fd = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return path.is_dir()  # half removed by a launcher that was killed at it
    except OSError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock_fd)
