"""Tests that must be alone on the machine, while others run side by side (`pytest -n 3`).

Each test takes its turn: any number of ordinary ones together, one that is marked `serial` only by
itself. Two locks on files that all processes of the session share: whoever holds the GATE is next;
it is let in (ROOM: shared, or for a serial test alone) before the gate opens for another. So a
serial test waits for those under way, and for nobody who came later.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(directory: Path, *, alone: bool) -> Iterator[None]:
    """Hold the machine for one test; `directory` is the same for all processes of the session."""
    gate = os.open(directory / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    room = os.open(directory / "room", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
    finally:
        os.close(room)
        os.close(gate)
