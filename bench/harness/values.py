"""Fresh values for every sample, and the check of the result of a collective.

Element i of what `owner` writes is i % 16381 + bias(owner, seed). The period is a prime, so that
blocks which land in the wrong place are noticed; all sums are small integers, exact in float32 in
whatever order a contender adds. numpy only: MPI's environments have no torch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

_PERIOD = 16381
_PATTERN = (np.arange(2 * _PERIOD) % _PERIOD).astype(np.float32)


def bias(owner: int, seed: int) -> int:
    return 7 * owner + seed % 5


def write(array: Array, owner: int, seed: int) -> None:
    """Fill the array with what `owner` contributes to the sample numbered `seed`."""
    tile = _PATTERN[:_PERIOD] + np.float32(bias(owner, seed))
    for start in range(0, array.size, _PERIOD):
        part = array[start : start + _PERIOD]
        part[:] = tile[: part.size]


def holds_copy(array: Array, owner: int, seed: int, offset: int = 0) -> bool:
    """Tell whether the array is what `owner` wrote, from element `offset` on."""
    return _holds(array, offset, 1, bias(owner, seed), 1)


def holds_sum(array: Array, world: int, seed: int, offset: int = 0, calls: int = 1) -> bool:
    """Tell whether the array is the sum over all ranks, summed again in place `calls - 1` times."""
    biases = sum(bias(owner, seed) for owner in range(world))
    return _holds(array, offset, world, biases, float(world) ** (calls - 1))


def _holds(array: Array, offset: int, times: int, added: int, scale: float) -> bool:
    first = offset % _PERIOD
    tile = (_PATTERN[first : first + _PERIOD] * np.float32(times) + np.float32(added)) * np.float32(
        scale
    )
    return all(
        np.array_equal(part, tile[: part.size])
        for part in (array[s : s + _PERIOD] for s in range(0, array.size, _PERIOD))
    )
