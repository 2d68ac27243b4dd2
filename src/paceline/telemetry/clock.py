"""The job's clock: seconds that mean the same moment in every process of a job.

On one host all processes share the kernel's monotonic clock. A process on another host than the
coordinator measures how far its own clock is from the coordinator's, and adds that.
"""

from __future__ import annotations

import time

_offset_s = 0.0  # set once, when this process has joined; a float is read and written whole


def now_s() -> float:
    """Return the time on the job's clock; on the coordinator's host its time.monotonic()."""
    return time.monotonic() + _offset_s


def set_offset(offset_s: float) -> None:
    """Add this from now on: the coordinator's clock minus that of this process."""
    global _offset_s
    _offset_s = offset_s
