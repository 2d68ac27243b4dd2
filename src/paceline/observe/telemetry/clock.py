"""The job's clock: seconds that mean the same moment in every process of a job.

On one host all processes share the kernel's monotonic clock. A process whose clock is another than
the coordinator's asks it for the time, several times (control/client/requests.py), and adds how
far apart they are:

    here     sent_s ------------------- received_s      offset = there - middle of sent and received
    there               \\_ there_s _/                   wrong by at most half of the round trip

Of several questions the one with the shortest round trip counts: what makes others longer (a busy
process, a queue in the network) delays one direction, and that is what shifts the middle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

_offset_s = 0.0  # set when this process has joined; a float is read and written whole


class Ping(NamedTuple):
    """A question for the time, and its answer."""

    sent_s: float  # on the clock of this process, as the next
    received_s: float
    there_s: float  # when it was answered, on the other clock

    @property
    def round_trip_s(self) -> float:
        return self.received_s - self.sent_s

    @property
    def offset_s(self) -> float:
        return self.there_s - (self.sent_s + self.received_s) / 2


class Offset(NamedTuple):
    """How far a clock is ahead of ours, and by how much that may be wrong."""

    offset_s: float
    error_s: float


def estimate(pings: Sequence[Ping]) -> Offset:
    """Return the offset that the quickest answer tells."""
    best = min(pings, key=lambda ping: ping.round_trip_s)
    return Offset(best.offset_s, best.round_trip_s / 2)


def now_s() -> float:
    """Return the time on the job's clock; on the coordinator's host its time.monotonic()."""
    return time.monotonic() + _offset_s


def offset_s() -> float:
    """Return what has to be added to time.monotonic() of this process."""
    return _offset_s


def set_offset(offset_s: float) -> None:
    """Add this from now on: the coordinator's clock minus that of this process."""
    global _offset_s
    _offset_s = offset_s
