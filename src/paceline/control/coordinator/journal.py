"""The coordinator's journal: an append-only file, from which a restarted coordinator resumes.

An entry is a 4-byte length, a 4-byte CRC-32 and a msgpack payload. Every announcement is in the
file, and on the disk, before it is sent (`append` with `sync`). A coordinator that dies while it
writes leaves a torn last entry. It was not announced, so the next coordinator truncates it. Damage
anywhere else is an error, because an announcement would be forgotten.

The members' store and the work pools are written too, but not synced: a killed process loses
nothing that it has written, and both are useless on any other machine.

A coordinator that cannot write must not send anything more (`on_failure`): it exits, and the next
one truncates the half-written entry.

The file belongs to one coordinator at a time, which holds a lock on it until its process ends. It
begins with the identity of the job, is private (0600), and is rewritten in short form when it has
grown long.

`CoordinatorState` is what the entries add up to: the roster's state, the changes that led to it,
store and pools.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from paceline.control import messages as m
from paceline.control.coordinator.store import StoreEntry, StoreService
from paceline.control.coordinator.work_pools import PoolEntry, WorkPools
from paceline.control.member import Membership
from paceline.control.membership.policy import Policy
from paceline.control.membership.state import RosterState
from paceline.control.wait_notice import WaitNotice
from paceline.errors import BadFrame, SetupError

VERSION = 1
MAX_BYTES = 4 << 20  # a longer journal is rewritten
_FRAME = struct.Struct("<II")
_LOCK_S = 5.0  # how long the previous coordinator may take to exit
_HISTORY = 256  # changes that a member may have missed


class Header(msgspec.Struct, frozen=True, tag=True):
    """The job that this journal belongs to."""

    version: int
    job_id: str
    policy: Policy


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """The full state of the roster, and the changes that were announced with it."""

    state: RosterState
    changes: tuple[m.Changed, ...] = ()


Entry: TypeAlias = Header | Recorded | StoreEntry | PoolEntry

_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


@dataclass(frozen=True)
class MissedChanges:
    """What happened while a member was disconnected."""

    changed: m.Changed | None  # None: nothing
    lost: frozenset[int]
    is_known: bool  # the history reaches back far enough


class CoordinatorState:
    """What the coordinator must remember; kept in its journal if it has one."""

    def __init__(
        self, journal: Journal | None, store: StoreService, pools: WorkPools | None = None
    ) -> None:
        self.state: RosterState | None = None
        self.before: Membership | None = None  # the membership before the last `keep`
        self.num_replayed = 0
        self._history: deque[m.Changed] = deque(maxlen=_HISTORY)
        self._journal, self._store, self._pools = journal, store, pools or WorkPools()
        if journal is None:
            return
        for entry in journal.entries:
            if isinstance(entry, Recorded):
                self.state = entry.state
                self._history.extend(entry.changes)
                self.num_replayed += 1
            elif isinstance(entry, PoolEntry):
                self._pools.replay(entry)
            elif not isinstance(entry, Header):
                store.replay(entry)
        journal.entries.clear()
        store.note = lambda entry: journal.append(entry, sync=False)
        self._pools.note = lambda entry: journal.append(entry, sync=False)

    def begin(self, state: RosterState) -> None:
        """Take the state with which a roster begins; it is not written."""
        self.state = state

    def keep(self, state: RosterState, changes: tuple[m.Changed, ...]) -> None:
        """Write the state if it differs from the last one, with the changes to be announced. Call
        this before anything is announced."""
        self.before = None if self.state is None else self.state.membership
        if state is self.state or state == self.state:
            return
        if self._journal is not None:
            self._journal.append(Recorded(state, changes))
        self.state = state
        self._history.extend(changes)

    def missed(self, now: Membership, known: int) -> MissedChanges:
        """Return all changes after generation `known` as one."""
        later = [one for one in self._history if one.membership.generation > known]
        if not later:
            return MissedChanges(None, frozenset(), known >= now.generation)
        lost = {loss.rank: loss for one in later for loss in one.lost}
        joined = tuple(rank for one in later for rank in one.joined if rank in now.ranks)
        why = "; ".join(one.why for one in later if one.why)
        changed = m.Changed(now, tuple(lost.values()), joined, why)
        is_known = later[0].membership.generation <= known + 1
        return MissedChanges(changed, frozenset(lost), is_known)

    def shorten(self) -> None:
        """Rewrite a journal that has grown long."""
        if self._journal is not None and self._journal.size_bytes > MAX_BYTES:
            self._journal.rewrite(self._entries())

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _entries(self) -> Iterator[Entry]:
        if self.state is not None:
            yield Recorded(self.state, tuple(self._history))
        yield from self._store.entries()
        yield from self._pools.entries()


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
        """Write an entry; with `sync` it survives a crash of the machine once this returns."""
        try:
            _write(self._fd, _framed(entry))
            if sync:
                os.fsync(self._fd)
        except OSError as error:
            # A part of the entry may be in the file: nothing may be written after it.
            self.close()
            text = f"journal {self.path} cannot be written: {error.strerror}"
            self.on_failure(text)
            raise SetupError(text) from error

    def rewrite(self, entries: Iterable[Entry]) -> None:
        """Replace all entries by these; the old file stays until the new one is complete."""
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
        """Release it to another coordinator. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _require_ours(self, first: Entry) -> None:
        if not isinstance(first, Header) or first.version != VERSION:
            raise BadFrame(f"journal {self.path}: it is of another version of Paceline; remove it")
        if first.job_id != self._header.job_id:
            raise SetupError(
                f"journal {self.path} belongs to job {first.job_id}, expected"
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
    notice = WaitNotice(f"the coordinator waits for the previous one to release {path}")
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
    """Return the entries and where the last complete one ends."""
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
                    " after that would be forgotten; start the job again"
                )
            break  # torn: its writer died before it announced the entry
        try:
            entries.append(_decoder.decode(payload))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadFrame(f"journal {path}, byte {at}: not an entry of ours: {error}") from None
        at = end
    return entries, at


def _sync_directory(path: Path) -> None:
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
