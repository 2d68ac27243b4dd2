"""The coordinator's journal: a file that only grows, from which its successor begins.

An entry is a 4-byte length, a 4-byte CRC-32 and a msgpack payload. What others are told is in the
file, and on the disk, before they are told (`append` with `sync`). A coordinator that dies while
it writes leaves a torn last entry: nobody has heard of it, so the next one cuts it off. Damage
anywhere else is an error, because then something that was announced would be forgotten.

What the members' store and the pools of work hold is written too, but not synced: a killed process
loses nothing that it has written, and neither is of any use on another machine than the members'
own coordinator's.

A coordinator that cannot write must not say another word (`on_failure`): it ends, and the next one
cuts off what it half wrote.

The file belongs to one coordinator at a time: it holds a lock on it, which ends with its process.
It begins with what the job is, is private (0600), and is written anew, in short, when it has grown
long.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

import msgspec

from paceline.control.membership.decisions import State
from paceline.control.membership.policy import Policy
from paceline.control.transport import messages as m
from paceline.control.wait_notice import WaitNotice
from paceline.errors import BadFrame, SetupError

VERSION = 1
MAX_BYTES = 4 << 20  # then it is written anew
_FRAME = struct.Struct("<II")
_LOCK_S = 5.0  # how long the last moments of the coordinator before us may take


class Header(msgspec.Struct, frozen=True, tag=True):
    """Which job this is the journal of."""

    version: int
    job_id: str
    policy: Policy


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """The whole state of the roster, and the changes that were announced with it."""

    state: State
    changes: tuple[m.Changed, ...] = ()


class Stored(msgspec.Struct, frozen=True, tag=True):
    """A change of the members' store, and the answer that whoever asked for it got."""

    key: str
    value: bytes | None  # None: deleted
    rank: int = -1  # -1: nobody will ask again
    request: int = 0
    reply: bytes | int | bool | None = None


class Answered(msgspec.Struct, frozen=True, tag=True):
    """An answer that was given, apart from what it changed: in journals that were shortened."""

    rank: int
    request: int
    reply: bytes | int | bool | None


class Forgotten(msgspec.Struct, frozen=True, tag=True):
    """A member is gone for good: it will not ask again."""

    rank: int


class Pooled(msgspec.Struct, frozen=True, tag=True):
    """A pool of work (work_pools.py) as it is; when it begins, nobody has anything of it."""

    line: str
    index: int
    portions: int
    start: int = 0
    lent: tuple[tuple[int, int], ...] = ()  # portion, rank
    back: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    answers: tuple[tuple[int, int, int], ...] = ()  # rank, request, portion
    before: tuple[tuple[int, int], ...] = ()


class Lending(msgspec.Struct, frozen=True, tag=True):
    """A member has done or given back portions, and was lent another one."""

    line: str
    index: int
    rank: int
    request: int  # 0: it did not ask for one
    portion: int  # -1: there was none
    done: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    before: tuple[tuple[int, int], ...] = ()  # ranges that an earlier job has done


class Unlent(msgspec.Struct, frozen=True, tag=True):
    """A member is gone: its portions are for others."""

    rank: int


class Closed(msgspec.Struct, frozen=True, tag=True):
    """Passes below this one are over."""

    line: str
    below: int


StoreEntry: TypeAlias = Stored | Answered | Forgotten
PoolEntry: TypeAlias = Pooled | Lending | Unlent | Closed
Entry: TypeAlias = Header | Recorded | StoreEntry | PoolEntry

_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


class Journal:
    """An open journal; `entries` is what was in it."""

    def __init__(self, path: Path, job_id: str, policy: Policy) -> None:
        self.path = path
        self.on_failure: Callable[[str], None] = lambda _: None  # nothing may be announced any more
        self._header = Header(VERSION, job_id, policy)
        self._fd = _open(path)
        try:
            _lock(self._fd, path)
            self.entries, size = _replay(self._fd, path)
            os.ftruncate(self._fd, size)
            if self.entries:
                self._require_ours(self.entries[0])
            else:
                self.append(self._header)
                _sync_directory(path)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def append(self, entry: Entry, *, sync: bool = True) -> None:
        """Write an entry; when this returns, with `sync`, it survives the machine."""
        try:
            _write(self._fd, _framed(entry))
            if sync:
                os.fsync(self._fd)
        except OSError as error:
            # Half an entry may be there, and nothing may be written behind it.
            self.close()
            text = f"journal {self.path} cannot be written: {error.strerror}"
            self.on_failure(text)
            raise SetupError(text) from error

    def rewrite(self, entries: Iterable[Entry]) -> None:
        """Begin anew with these entries; the old file stays until the new one is complete."""
        draft = self.path.with_name(f"{self.path.name}.new")
        draft.unlink(missing_ok=True)
        fd = _open(draft)
        try:
            _lock(fd, draft)
            _write(fd, b"".join(map(_framed, (self._header, *entries))))
            os.fsync(fd)
            draft.rename(self.path)
            _sync_directory(self.path)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        """Let another coordinator have it. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _require_ours(self, first: Entry) -> None:
        if not isinstance(first, Header) or first.version != VERSION:
            raise BadFrame(f"journal {self.path}: it is of another version of Paceline; remove it")
        if first.job_id != self._header.job_id:
            raise SetupError(
                f"journal {self.path} is that of job {first.job_id}, expected"
                f" {self._header.job_id}; give each job its own journal"
            )


def _framed(entry: Entry) -> bytes:
    payload = msgspec.msgpack.encode(entry)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise SetupError(f"journal {path} cannot be opened: {error.strerror}") from error


def _lock(fd: int, path: Path) -> None:
    deadline_s = time.monotonic() + _LOCK_S
    notice = WaitNotice(f"the coordinator waits for the one before it to let go of {path}")
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # noqa: PERF203  # each turn waits anyway
            if time.monotonic() >= deadline_s:
                raise SetupError(
                    f"journal {path} is used by another coordinator that still runs; end it first"
                ) from None
            notice.check()
            time.sleep(0.02)


def _replay(fd: int, path: Path) -> tuple[list[Entry], int]:
    """Return the entries and where the last whole one ends."""
    with open(os.dup(fd), "rb") as file:
        data = file.read()
    entries: list[Entry] = []
    at = 0
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + length
        payload = data[at + _FRAME.size : end]
        if end > len(data) or zlib.crc32(payload) != checksum:
            if end < len(data):
                raise BadFrame(
                    f"journal {path} is damaged at byte {at} of {len(data)}: what was announced"
                    " after that would be forgotten; the job has to be started again"
                )
            break  # torn: its writer died before anybody heard of it
        try:
            entries.append(_decoder.decode(payload))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadFrame(f"journal {path}, byte {at}: no entry of ours: {error}") from None
        at = end
    return entries, at


def _sync_directory(path: Path) -> None:
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
