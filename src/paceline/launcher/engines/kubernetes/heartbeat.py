"""The heartbeat of a pod's program: a file with its process number and the time of its last beat.

The program's own loop beats, so a program that hangs or is stopped is seen, which a look at the
process or at its port would not show. probe.py reads the file. The time is that of the monotonic
clock, which all processes of a pod share and which is never set.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

HEARTBEAT_DIRECTORY = "/run/paceline"
FILE_NAME = "heartbeat"
BEAT_S = 1.0
LATE_S = 30.0  # a busy machine may delay a loop for seconds


async def beat(directory: Path) -> None:
    """Beat until cancelled. A full or missing directory costs the pod its life, not this loop."""
    while True:
        with suppress(OSError):
            write(directory)
        await asyncio.sleep(BEAT_S)


def write(directory: Path) -> None:
    draft = directory / f"{FILE_NAME}.{os.getpid()}"
    draft.write_text(f"{os.getpid()} {time.monotonic():.3f}\n")
    draft.rename(directory / FILE_NAME)


def problem(directory: Path, late_s: float = LATE_S) -> str:
    """Return what is wrong with the program of this pod; "" if it is alive."""
    path = directory / FILE_NAME
    try:
        pid, beat_s = path.read_text().split()
        silent_s = time.monotonic() - float(beat_s)
        state = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError) as error:
        return f"no heartbeat in {path}: {error}"
    if state in "TtZX":
        return f"process {pid} is {'stopped' if state in 'Tt' else 'dead'}"
    return f"no heartbeat for {silent_s:.0f} s" if silent_s > late_s else ""
