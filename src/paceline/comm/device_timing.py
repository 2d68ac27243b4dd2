"""Times of a device, by events that it records while it works. The host never waits for them."""

from __future__ import annotations

import threading
from collections import deque

import torch

_MOST_LAPS = 64  # that wait for the device; a host that is further ahead drops laps


class DeviceLaps:
    """How long the device takes from one step to the next. Any thread may read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._laps: deque[torch.Event] = deque()  # guarded by: _lock
        self._ms = 0.0  # of `_count` laps since the last reading
        self._count = 0
        self.total_ms = 0.0

    def lap(self) -> None:
        """Record the end of a step on the current stream. Never waits."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        with self._lock:
            self._laps.append(event)
            self._count_done()
            if len(self._laps) > _MOST_LAPS:
                self._laps.clear()

    def mean_ms(self) -> float | None:
        """Return the mean of the laps since the last call, None if none is known. Never waits."""
        with self._lock:
            self._count_done()
            count, ms, self._count, self._ms = self._count, self._ms, 0, 0.0
        return ms / count if count else None

    def _count_done(self) -> None:
        while len(self._laps) > 1 and self._laps[1].query():
            ms = self._laps.popleft().elapsed_time(self._laps[0])
            self._ms, self._count = self._ms + ms, self._count + 1
            self.total_ms += ms
