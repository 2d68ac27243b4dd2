"""How long each step of each worker takes when computing is a sleep.

Delays are drawn from a generator that depends on seed and worker only: a worker that sleeps and the
simulation that predicts it draw the same numbers without communication.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Delays:
    """The speed of some workers: each has its own, and any step may be slow by chance."""

    base_s: float
    factors: tuple[float, ...]  # of each worker, in every step
    chance: float = 0.0  # that a step is slow on top of that
    slow_factor: float = 1.0  # and how much
    seed: int = 0

    @property
    def num_workers(self) -> int:
        return len(self.factors)

    def of(self, worker: int, count: int) -> list[float]:
        """Return the seconds of the worker's first `count` steps."""
        draws = random.Random(1_000_003 * self.seed + worker)
        usual_s = self.base_s * self.factors[worker]
        return [
            usual_s * (self.slow_factor if draws.random() < self.chance else 1.0)
            for _ in range(count)
        ]

    def until(self, horizon_s: float) -> list[list[float]]:
        """Return for each worker more delays than it can sleep before the horizon."""
        shortest = [self.base_s * factor * min(1.0, self.slow_factor) for factor in self.factors]
        return [self.of(w, int(horizon_s / short_s) + 2) for w, short_s in enumerate(shortest)]

    def as_request(self) -> dict[str, Any]:
        """Return what JSON can carry to a worker."""
        return asdict(self)

    @classmethod
    def from_request(cls, request: dict[str, Any]) -> Delays:
        factors: Sequence[float] = request["factors"]
        return cls(**{**request, "factors": tuple(factors)})


def one_slow(num_workers: int, base_s: float, slow_factor: float) -> Delays:
    """The last worker takes `slow_factor` times as long, in every step."""
    return Delays(base_s, (*[1.0] * (num_workers - 1), slow_factor))


def sometimes_slow(
    num_workers: int, base_s: float, chance: float, slow_factor: float, seed: int
) -> Delays:
    """All are alike, and each step of each is slow with the given chance."""
    return Delays(base_s, (1.0,) * num_workers, chance, slow_factor, seed)
