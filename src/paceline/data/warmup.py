"""Data warm-up: the first epochs go over a part of the data only.

The part is drawn from the seed of the loader, so it is the same on all workers, in each of those
epochs and in the next run; in which order it comes is the loader's affair, as always.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True)
class DataWarmup:
    """How much of the data the first epochs go over; made by `pl.data_warmup`."""

    fraction: float
    epochs: int

    def __str__(self) -> str:
        return f"data_warmup({self.fraction:g}, epochs={self.epochs})"

    def num_samples(self, samples: int, epoch: int) -> int:
        """Return how many of so many samples an epoch goes over."""
        if epoch >= self.epochs:
            return samples
        return min(samples, max(1, math.ceil(self.fraction * samples - 1e-9)))


def data_warmup(fraction: float, epochs: int = 1) -> DataWarmup:
    """Let training begin with a part of the data: `pl.shard(loader, warmup=...)` goes over this
    fraction of the samples in epochs 0 to epochs - 1, and over all of them from then on. The
    samples are drawn once, alike on all workers; each of them comes once in an epoch.

    >>> loader = DataLoader(range(20), batch_size=2)
    >>> warmup = pl.data_warmup(0.1, epochs=2)
    >>> [len(pl.shard(loader, epoch=epoch, warmup=warmup)) for epoch in range(4)]
    [1, 1, 10, 10]
    """
    try:
        share, count = float(fraction), operator.index(epochs)
    except (TypeError, ValueError):
        raise UsageError(
            f"data_warmup({fraction!r}, epochs={epochs!r}): expected a fraction of the data and a"
            " whole number of epochs"
        ) from None
    if not 0 < share <= 1:
        raise UsageError(
            f"data_warmup({fraction!r}): the fraction of the data must be above 0 and at most 1"
        )
    if count < 0:
        raise UsageError(f"data_warmup(..., epochs={epochs}): expected 0 or more")
    return DataWarmup(share, count)
