"""The staging directory of a save, shared by all workers, and the processes that own it.

    root/.saving-000000100-NONCE/
        checkpoint/            becomes root/step-000000100 by one rename
        record-00001.json      what the writer of part 1 reports about it
        owner-3f2a...json      a process that takes part; when all have ended, the save is dead

Owners are identified by host, boot, pid namespace, pid and start time. Whether a process on another
host still runs is unknown: its save counts as dead if nothing in it has changed for a day.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.runtime.config import natural_host_id
from paceline.runtime.machine import process_start
from paceline.state.files import durable_files as files

INNER = "checkpoint"
_OUTER = re.compile(r"\.saving-([0-9]{9,18})-[A-Za-z0-9_-]{1,64}", re.ASCII)
_DEAD_AFTER_S = 24 * 3600.0


class SaveOwner(msgspec.Struct, frozen=True):
    """A process that takes part in a save."""

    host: str
    boot: str
    pid_namespace: int
    pid: int
    start: str

    @classmethod
    def here(cls) -> SaveOwner:
        pid = os.getpid()
        boot = natural_host_id().rpartition("-")[0]
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return cls(socket.gethostname(), boot, namespace, pid, process_start(pid) or "")

    def is_gone(self, here: SaveOwner) -> bool:
        """Return whether it has certainly ended."""
        if self.host != here.host:
            return False
        if self.boot != here.boot:
            return True  # the machine has been rebooted since
        return self.pid_namespace == here.pid_namespace and process_start(self.pid) != self.start


def begin(root: Path, step: int, nonce: str) -> Path:
    """Create or join the staging directory of a save; return the directory of its parts.

    All workers of a save call it with the same nonce, which is unique to the save.
    """
    outer = root / f".saving-{step:09d}-{nonce}"
    if not _OUTER.fullmatch(outer.name):
        raise UsageError(
            f"step {step}, nonce {nonce!r}: expected a step >= 0, and up to 64 letters, digits,"
            " - or _ as nonce"
        )
    with files.disk_errors("prepare", outer):
        _make_root(root)
        files.make_directory(outer)
        owner = msgspec.json.encode(SaveOwner.here())
        mark = outer / f"owner-{hashlib.sha256(owner).hexdigest()[:16]}.json"
        if not mark.exists():
            files.write_new(mark, [owner], need_bytes=len(owner))
        files.make_directory(outer / INNER)
    return outer / INNER


def outer_of(staging: Path) -> Path:
    """Return the parent of a staging directory that `begin` returned."""
    if staging.name != INNER or not _OUTER.fullmatch(staging.parent.name):
        raise UsageError(f"{staging} is not a staging directory of a checkpoint")
    return staging.parent


def abandon(staging: Path) -> None:
    """Remove an unfinished save, if it exists."""
    files.remove_at_once(outer_of(staging))


def is_dead(outer: Path) -> bool:
    """Return whether no process works on a save any more. False if it is not a save."""
    if not _OUTER.fullmatch(outer.name):
        return False
    here = SaveOwner.here()
    try:
        marks = [path.read_bytes() for path in outer.glob("owner-*.json")]
        owners = [msgspec.json.decode(mark, type=SaveOwner) for mark in marks]
        if owners and all(owner.is_gone(here) for owner in owners):
            return True
    except (OSError, ValueError, RecursionError):
        pass  # being written or removed; its age decides
    try:
        newest = max(path.lstat().st_mtime for path in (outer, *outer.rglob("*")))
    except OSError:
        return False  # it is being removed
    return time.time() - newest > _DEAD_AFTER_S


def _make_root(root: Path) -> None:
    if not root.exists():
        if root.parent != root:
            _make_root(root.parent)
        if files.make_directory(root):
            files.sync_directory(root.parent)
