"""How a pass is cut into portions that workers take one after the other: arithmetic only.

Large portions cost few questions, small ones let all workers end together. So portions shrink: each
is a fixed fraction of what is left, down to a single batch (guided self-scheduling). None is larger
than a few dozen batches, because that much is computed again when a worker is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

_FRACTION = 4  # of what is left, a worker's share is cut into so many portions
MOST = 32  # batches in a portion


def cut_portions(costs: Sequence[float], workers: int) -> list[range]:
    """Cut a row of batches, given what each costs, into portions for so many workers.

    >>> [len(portion) for portion in cut_portions([1] * 24, 2)]
    [3, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    left, start, portions = float(sum(costs)), 0, list[range]()
    while start < len(costs):
        most = left / (_FRACTION * workers)
        stop, taken = start + 1, float(costs[start])
        while stop < len(costs) and stop - start < MOST and taken + costs[stop] <= most:
            taken += costs[stop]
            stop += 1
        portions.append(range(start, stop))
        start, left = stop, left - taken
    return portions
