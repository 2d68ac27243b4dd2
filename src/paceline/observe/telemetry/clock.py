"""The job's clock: seconds that mean the same moment in every process of a job.

On one host all processes share the kernel's monotonic clock. A process on another host asks the
coordinator for the time several times (control/client/requests.py), and adds the difference:

    here     sent_s ------------------- received_s      offset = there - middle of sent and received
    there               \\_ there_s _/                   error: at most half of the round trip

The answer with the shortest round trip counts: a busy process or a queue in the network delays one
direction, which shifts the middle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

_offset_s = 0.0  # set when this process joins; reading and writing a float is atomic


class Ping(NamedTuple):
    """A request for the time, and its answer."""

    sent_s: float  # on the clock of this process, like received_s
    received_s: float
    there_s: float  # time of the answer, on the other clock

    @property
    def round_trip_s(self) -> float:
        return self.received_s - self.sent_s

    @property
    def offset_s(self) -> float:
        return self.there_s - (self.sent_s + self.received_s) / 2


class Offset(NamedTuple):
    """How far a clock is ahead of this process, and the possible error."""

    offset_s: float
    error_s: float


def estimate(pings: Sequence[Ping]) -> Offset:
    """Return the offset measured by the quickest answer."""
    best = min(pings, key=lambda ping: ping.round_trip_s)
    return Offset(best.offset_s, best.round_trip_s / 2)


def now_s() -> float:
    """Return the time on the job's clock: time.monotonic() of the coordinator's host."""
    return time.monotonic() + _offset_s


def offset_s() -> float:
    """Return the job's clock minus time.monotonic() of this process."""
    return _offset_s


def set_offset(offset_s: float) -> None:
    """Set the coordinator's clock minus the clock of this process."""
    global _offset_s
    _offset_s = offset_s
