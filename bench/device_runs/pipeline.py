"""How much of the exchange a schedule can hide: the best that three stages allow.

A bucket goes to the host, is exchanged, and goes back. Each stage has one bucket at a time, in the
order of the buckets, and a bucket starts when its last gradient is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trip:
    """One bucket: when it is ready, and how long each stage takes (ms)."""

    ready_ms: float
    out_ms: float
    exchange_ms: float
    in_ms: float

    @property
    def busy_ms(self) -> float:
        return self.out_ms + self.exchange_ms + self.in_ms


def best_end_ms(trips: Sequence[Trip]) -> float:
    """Return when the last bucket is back on the device, at the earliest."""
    ends = [0.0, 0.0, 0.0]
    for trip in trips:
        at = trip.ready_ms
        for stage, length in enumerate((trip.out_ms, trip.exchange_ms, trip.in_ms)):
            at = ends[stage] = max(at, ends[stage]) + length
    return ends[-1]


def hidden_share(trips: Sequence[Trip], backward_ms: float, exposed_ms: float) -> float:
    """Return the hidden time of all stages, as a share of what the best schedule hides."""
    busy_ms = sum(trip.busy_ms for trip in trips)
    best_exposed_ms = max(0.0, best_end_ms(trips) - backward_ms)
    return (busy_ms - exposed_ms) / (busy_ms - best_exposed_ms)


def bucket_ready_ms(
    gradients: Sequence[tuple[float, int]], bucket_bytes: Sequence[int]
) -> list[float]:
    """Return when each bucket is full. `gradients`: (time, bytes) in the order of backward."""
    ready, done, rest = [], 0, list(gradients)
    total = 0
    for size in bucket_bytes:
        total += size
        at = ready[-1] if ready else 0.0
        while rest and done < total:
            at, more = rest.pop(0)
            done += more
        ready.append(at)
    return ready
