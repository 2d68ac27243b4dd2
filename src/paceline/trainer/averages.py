"""Means over samples, and over workers.

Every value is the mean over a batch. Batches have different sizes, and workers different numbers of
them, also none: so sums are kept, each value times its samples, and divided at the very end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from paceline.job import Job


class Averages:
    """Sums of values by name, weighted by samples."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sums = dict.fromkeys(names, 0.0)
        self._samples = 0.0

    def add(self, values: Mapping[str, float], samples: int) -> None:
        """Take in the means over a batch of so many samples; 0: one that does not count."""
        if samples:
            self._samples += samples
            for name, value in values.items():
                self._sums[name] += value * samples

    @property
    def numbers(self) -> list[float]:
        """The sums, and at the end how many samples are in them: those of workers are added up."""
        return [*self._sums.values(), self._samples]

    @numbers.setter
    def numbers(self, numbers: Sequence[float]) -> None:
        *sums, self._samples = numbers
        self._sums = dict(zip(self._sums, sums, strict=True))

    def means_of(self, numbers: Sequence[float]) -> dict[str, float]:
        """Return the means that follow from such numbers; NaN if there was no sample at all."""
        *sums, samples = numbers
        pairs = zip(self._sums, sums, strict=True)
        return {name: total / samples if samples else math.nan for name, total in pairs}


class Meeting:
    """Where the workers of a Trainer tell each other numbers. All methods are collective."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._group = job, job.worker_group(name)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else, nor will be."""
        return self._group.size == 1 and not self._job.elastic.is_on

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """Add up the numbers of all workers; again among those who are left if one is lost."""

        def attempt() -> list[float]:
            told = torch.tensor(numbers, dtype=torch.float64)
            self._group.all_reduce(told)
            return told.tolist()

        return self._job.elastic.point(attempt)

    def agree(self, is_wished: bool) -> bool:
        """Say whether anybody wishes it."""
        return self.add_up([float(is_wished)])[0] > 0
