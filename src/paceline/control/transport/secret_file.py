"""The private files of a job: its secret, and where rank 0 publishes the coordinator.

The SECRET is 256 random bits. It never travels in an argument (command lines are public) and never
in a message: a process receives the name of a file. A file that others could read is refused,
because then it is no secret.

Rank 0 PUBLISHES the coordinator to the other ranks of its host in a file that is named after the
job. It lies in a directory of mode 0700 that belongs to this user, and appears in one piece. It
also says which process wrote it (pid and start time), so that a file left behind by a killed job is
recognised: readers ignore it, and the next rank 0 of that name replaces it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.control.wait_notice import WaitNotice
from paceline.errors import AuthError, RendezvousError
from paceline.runtime.config import JobEnv, process_start, runtime_dir

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


_POLL_S = 0.02


class Contents(msgspec.Struct, frozen=True):
    """What the file says."""

    address: str
    secret_hex: str
    pid: int
    start: str  # of that process, see config.process_start

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.secret_hex)

    @property
    def is_current(self) -> bool:
        return process_start(self.pid) == self.start


@dataclass(frozen=True)
class Published:
    """Our own file; to be removed when the job no longer accepts members."""

    path: Path
    pid: int

    def remove(self) -> None:
        if os.getpid() == self.pid:  # a forked child that cleans up must not take it away
            self.path.unlink(missing_ok=True)


def publish(env: JobEnv, address: str, secret: bytes) -> Published:
    """Write the file of this job; RendezvousError when another live process has done so."""
    path = _path(env)
    _sweep(path.parent)
    pid = os.getpid()
    contents = Contents(address, secret.hex(), pid, process_start(pid) or "")
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    write_private(draft, msgspec.json.encode(contents))
    try:
        while not _appear(draft, path):
            other = _read(path)
            if other is not None and other.is_current:
                raise RendezvousError(
                    f"rank 0 of job {env.job_id} is already running as pid {other.pid}, found by"
                    f" pid {pid}; give each job its own name with PACELINE_JOB"
                )
            path.unlink(missing_ok=True)
    finally:
        draft.unlink()
    return Published(path, pid)


def wait_for(env: JobEnv, timeout_s: float) -> Contents:
    """Wait until rank 0 has published and return what it says."""
    path = _path(env)
    deadline = time.monotonic() + timeout_s
    notice = WaitNotice(f"rank {env.rank} waits for rank 0 of job {env.job_id} to start")
    while time.monotonic() < deadline:
        contents = _read(path)
        if contents is not None and contents.is_current:
            return contents
        notice.check()
        time.sleep(_POLL_S)
    raise RendezvousError(
        f"rank {env.rank} waited {timeout_s:g} s for rank 0 of job {env.job_id} to write {path};"
        " see why it did not start; if it did, give all ranks the same PACELINE_JOB"
    )


def _sweep(directory: Path) -> None:
    """Remove what killed jobs left behind, of whatever name."""
    for path in directory.glob("job-*"):
        contents = _read(path)
        if contents is not None and not contents.is_current:
            path.unlink(missing_ok=True)


def _appear(draft: Path, path: Path) -> bool:
    """Give the finished file its name, unless the name is taken."""
    try:
        os.link(draft, path, follow_symlinks=False)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> Contents | None:
    """Return the file's contents, None when there is none; AuthError when it is not ours alone."""
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(read_private(path), type=Contents)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # not written by us: as good as stale
    except AuthError:
        if not path.exists():
            return None  # removed between the two looks
        raise


def _path(env: JobEnv) -> Path:
    digest = hashlib.sha256(env.job_id.encode()).hexdigest()[:32]
    return _private_directory() / f"job-{digest}.json"


def _private_directory() -> Path:
    """Return paceline-<uid> in the runtime directory, made or checked to be ours alone."""
    path = Path(runtime_dir()) / f"paceline-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        raise AuthError(
            f"{path} must be a directory of uid {os.getuid()} with mode 0700, found uid"
            f" {status.st_uid} and mode {mode:04o}; remove it, or set XDG_RUNTIME_DIR"
        )
    return path
