"""Files of checkpoints: written durably, opened without following links.

A file is new (never overwritten), hashed while it is written, and on the disk when `write_new`
returns. An error of the disk becomes a CheckpointError with path, size and free space.
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

PIECE_BYTES = 4 << 20  # written or read at a time, so that other threads can run
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def disk_errors(action: str, path: Path, *, need_bytes: int = 0) -> Iterator[None]:
    """Convert an OSError into a CheckpointError that names the action."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"cannot {action} {path}: {reason}"
        if error.errno in _NO_SPACE:
            text += f": need {data_size(need_bytes)}, {free_text(path)}"
        raise CheckpointError(text, path=path) from error


def require_space(need_bytes: int, directory: Path) -> None:
    """Raise CheckpointError if the space does not suffice; a quota shows only while writing."""
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
    """Write a new file; return its SHA-256 and size. Remove it on an error."""
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
                os.close(fd)  # may be the first call to fail (NFS)
        except BaseException:
            with suppress(OSError):  # the first error is raised
                path.unlink()
            raise
    return digest.hexdigest(), size


def make_directory(path: Path) -> bool:
    """Create a directory if needed; return whether it was created. A link is an error."""
    with disk_errors("create", path):
        try:
            path.mkdir()
        except FileExistsError:
            if path.is_symlink() or not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
            return False
    return True


def sync_directory(path: Path) -> None:
    """Make added and removed names of a directory durable."""
    with disk_errors("sync", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove_at_once(path: Path) -> None:
    """Remove a directory; rename it first, so that no process finds it half removed.

    It need not exist. If a process dies here, `sweep` recognizes the rest by its name.
    """
    going = path.with_name(f".deleting-{path.name.lstrip('.')}-{secrets.token_hex(4)}")
    with disk_errors("remove", path), suppress(FileNotFoundError):
        path.rename(going)
    remove_tree(going)


def remove_tree(path: Path) -> None:
    """Remove a directory; another process may remove it too. Links are not followed."""

    def refuse(_function: object, _path: str, info: tuple[object, BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            raise info[1]

    with disk_errors("remove", path):
        shutil.rmtree(path, onerror=refuse)


@contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """Open a checkpoint's directory, so that all files come from the same directory."""
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
    """Open a regular file of an open directory; yield descriptor and size."""
    try:
        # O_NONBLOCK: opening a named pipe must not hang.
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
    """Fill a buffer from an open file; raise CheckpointCorrupt if the file ends early."""
    while buffer:
        count = os.readv(fd, [buffer[:PIECE_BYTES]])
        if not count:
            text = f"{path} ends {len(buffer)} bytes early: it was truncated while it was read"
            raise CheckpointCorrupt(text, path=path)
        buffer = buffer[count:]


def free_text(path: Path) -> str:
    """Return how much space is free at a path or its nearest parent."""
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
