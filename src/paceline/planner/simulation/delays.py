"""How long workers compute: seeded random numbers, relative to the mean step of the profile."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.planner.quantities import Straggler

Vector = NDArray[np.float64]


class Delays:
    """Factors of workers' steps: lognormal with the profile's cv, times the stragglers'.

    Lognormal, because a step is never negative and delays have a long tail.
    """

    def __init__(self, num_workers: int, cv: float, straggler: Straggler, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._num_workers = num_workers
        self._straggler = straggler
        self._sigma = float(np.sqrt(np.log1p(cv * cv)))

    def step(self) -> Vector:
        """Return the factors of all workers in one step."""
        count = self._num_workers
        factors = np.ones(count)
        if self._sigma:
            factors = np.exp(
                self._random.normal(-self._sigma * self._sigma / 2, self._sigma, count)
            )
        straggler = self._straggler
        if straggler.probability:
            hit = self._random.random(count) < straggler.probability
            factors[hit] *= straggler.factor
        if straggler.workers:
            factors[: straggler.workers] *= straggler.factor
        return factors
