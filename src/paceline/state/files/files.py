"""Files of checkpoints: written so that they last, opened so that nothing leads away.

A file is new (never written over), hashed while it is written, and on the disk when `write_new`
returns. Whatever the disk refuses becomes a CheckpointError with path, size and free space.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import CheckpointCorrupt, CheckpointError, CheckpointUnsafe
from paceline.runtime.formatting import data_size

PIECE_BYTES = 4 << 20  # written or read at a time: other threads run in between
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def disk_errors(action: str, path: Path, *, need_bytes: int = 0) -> Iterator[None]:
    """Turn what the system refuses into a CheckpointError that says what was being done."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"cannot {action} {path}: {reason}"
        if error.errno in _NO_SPACE:
            text += f": need {data_size(need_bytes)}, {free_text(path)}"
        raise CheckpointError(text, path=path) from error


def require_space(need_bytes: int, directory: Path) -> None:
    """Say before the work what cannot fit; a quota shows only while writing."""
    with disk_errors("look at", directory):
        free = _free_bytes(directory)
    if free < need_bytes:
        raise CheckpointError(
            f"need {data_size(need_bytes)}, {data_size(free)} free on {directory}; make room, save"
            " elsewhere or keep fewer checkpoints",
            path=directory,
        )


def write_new(
    path: Path, pieces: Iterable[bytes | memoryview], *, need_bytes: int
) -> tuple[str, int]:
    """Write a file that did not exist; return its SHA-256 and size. Removes it on an error."""
    digest, size = hashlib.sha256(), 0
    with disk_errors("write", path, need_bytes=need_bytes):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    digest.update(view)
                    size += len(view)
                    while view:
                        view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)  # may be the first to tell of an error (NFS)
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                path.unlink()
            raise
    return digest.hexdigest(), size


def make_directory(path: Path) -> bool:
    """Make it unless it is there; return whether it was made. A link is not taken for one."""
    with disk_errors("create", path):
        try:
            path.mkdir()
        except FileExistsError:
            if path.is_symlink() or not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
            return False
    return True


def sync_directory(path: Path) -> None:
    """Make names that were added to or removed from a directory last."""
    with disk_errors("sync", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove_at_once(path: Path) -> None:
    """Remove a directory so that nobody finds it half removed: it is renamed first.

    One that is not there is fine. What a process that dies here leaves is known by its name.
    """
    going = path.with_name(f".deleting-{path.name.lstrip('.')}-{secrets.token_hex(4)}")
    with disk_errors("remove", path), suppress(FileNotFoundError):
        path.rename(going)
    remove_tree(going)


def remove_tree(path: Path) -> None:
    """Remove a directory; what somebody else removes meanwhile is fine, links are not followed."""

    def refuse(_function: object, _path: str, info: tuple[object, BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            raise info[1]

    with disk_errors("remove", path):
        shutil.rmtree(path, onerror=refuse)


@contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """Open a checkpoint's directory, so that all of its files come from the same one."""
    try:
        fd = os.open(path, _READ_ONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _not_opened(path, error) from error
    with disk_errors("read", path):
        try:
            yield fd
        finally:
            os.close(fd)


@contextmanager
def opened_file(path: Path, directory: int) -> Iterator[tuple[int, int]]:
    """Open a regular file of an open directory; give descriptor and size."""
    try:
        # O_NONBLOCK: opening a pipe that somebody put there must not hang.
        fd = os.open(path.name, _READ_ONLY | os.O_NONBLOCK, dir_fd=directory)
    except OSError as error:
        raise _not_opened(path, error) from error
    with disk_errors("read", path):
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointUnsafe(f"{path} is not a regular file", path=path)
            yield fd, status.st_size
        finally:
            os.close(fd)


def read_into(fd: int, buffer: memoryview, path: Path) -> None:
    """Fill a buffer from an opened file; CheckpointCorrupt when it ends before."""
    while buffer:
        count = os.readv(fd, [buffer[:PIECE_BYTES]])
        if not count:
            text = f"{path} ends {len(buffer)} bytes early: it was cut while it was read"
            raise CheckpointCorrupt(text, path=path)
        buffer = buffer[count:]


def free_text(path: Path) -> str:
    """Say how much is free where a path is, or was to be."""
    for place in (path, *path.parents):
        with suppress(OSError):
            return f"{data_size(_free_bytes(place))} free on {place}"
    return "free space unknown"


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _not_opened(path: Path, error: OSError) -> CheckpointError:
    if path.is_symlink():  # ELOOP for a file, ENOTDIR for a directory
        return CheckpointUnsafe(
            f"{path} is a symbolic link, which is not followed; name the checkpoint's directory"
            " itself, with its own files in it",
            path=path,
        )
    return CheckpointError(f"cannot open {path}: {error.strerror}", path=path)
