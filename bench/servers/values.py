"""What is pushed, and the check that a pull returned the right parameters.

The parameters begin at zero and the server applies SGD with a rate that is a power of two, so that
all sums are exact in float32 whatever the order. A worker that has pushed must see its own push and
may or may not see what other workers pushed at the same time, element by element: the server is
asynchronous. All pushes of earlier samples must be there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from harness.values import bias

Array = npt.NDArray[np.float32]

RATE = 2.0**-10
PERIOD = 16381  # of harness.values.write: element i of a push is i % PERIOD + bias
_RAMP = np.arange(PERIOD, dtype=np.float32)


@dataclass
class Applied:
    """The pushes that the parameters consist of: how many, and the sum of their biases."""

    pushes: int = 0
    biases: int = 0

    def and_pushes_of(self, owners: range | list[int], seed: int) -> Applied:
        """Return this with one more push of each of the owners."""
        added = sum(bias(owner, seed) for owner in owners)
        return Applied(self.pushes + len(owners), self.biases + added)

    def tile(self) -> Array:
        """Return the first PERIOD parameters, after which they repeat."""
        return (_RAMP * np.float32(self.pushes) + np.float32(self.biases)) * np.float32(-RATE)


def holds_one_of(params: Array, allowed: list[Applied]) -> bool:
    """Tell whether each element is what one of the allowed states has there."""
    tiles = [state.tile() for state in allowed]
    for start in range(0, params.size, PERIOD):
        part = params[start : start + PERIOD]
        fits = part == tiles[0][: part.size]
        for tile in tiles[1:]:
            fits |= part == tile[: part.size]
        if not fits.all():
            return False
    return True
