"""The job's secret: 256 random bits in a file that only its owner can read.

The secret never travels in an argument (command lines are public) and never in a message: a process
receives the name of a file. A file that others could read is refused, because then it is no secret.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from paceline.errors import AuthError

SECRET_BYTES = 32
_HOW_TO = (
    "create one with: (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > FILE)"
)


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def create_secret_file(directory: str | os.PathLike[str]) -> Path:
    """Write a new secret into `directory`, readable by this user only; return its path."""
    path = Path(directory) / f"secret-{secrets.token_hex(8)}"
    write_private(path, new_secret().hex().encode() + b"\n")
    return path


def load_secret(path: str | os.PathLike[str]) -> bytes:
    """Read a secret; AuthError names the file when it is missing, exposed or malformed."""
    text = read_private(path).decode("ascii", errors="replace").strip()
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise AuthError(
            f"secret file {os.fspath(path)} does not hold {2 * SECRET_BYTES} hexadecimal digits;"
            f" {_HOW_TO}"
        )
    return secret


def write_private(path: Path, content: bytes) -> None:
    """Create a file of mode 0600 that did not exist before, following no link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)


def read_private(path: str | os.PathLike[str]) -> bytes:
    """Read a small file after checking, on the open descriptor, that it is ours alone."""
    name = os.fspath(path)
    try:
        # O_NONBLOCK: opening a pipe that somebody put there must not hang.
        with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AuthError(f"secret file {name} is not a regular file; {_HOW_TO}")
            if status.st_uid not in (os.getuid(), 0):
                raise AuthError(
                    f"secret file {name} belongs to uid {status.st_uid}, this process to"
                    f" {os.getuid()}; use a file of your own"
                )
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o077:
                raise AuthError(
                    f"secret file {name} has mode {mode:04o}, others can use it; expected 0600:"
                    f" make a new secret, then chmod 600 {name}"
                )
            return file.read(4096)
    except OSError as error:
        raise AuthError(f"secret file {name} cannot be read: {error.strerror}") from error
