"""How fast this machine copies memory: the unit in which the planner counts passes over a model."""

from __future__ import annotations

import time

import numpy as np

_PROBED_BYTES = 64 << 20


def copy_bytes_per_s(probed_bytes: int = _PROBED_BYTES) -> float:
    """Return how many bytes one core copies in a second, of blocks that fit into no cache."""
    source, target = np.ones(probed_bytes, np.uint8), np.zeros(probed_bytes, np.uint8)
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start_s)
    return probed_bytes / min(times)
