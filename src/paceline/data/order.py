"""The order of samples of one pass, the same on all ranks.

A plain or shuffled loader's order can be worked out by every rank alone: LocalOrder. The order of a
user's sampler cannot (it may be random, or ask the time of day), so rank 0 iterates its own and
tells the others: ToldOrder. It tells in chunks, since a sampler may be endless, and only when all
ranks are between two batches: `prepare()` is collective, `take()` is not. A DataLoader with workers
takes from the order ahead of time, each rank as far as it likes, hence the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from paceline.collectives.agreement import take_from
from paceline.collectives.group import Group
from paceline.data.portable import portable, restored
from paceline.data.split import Units, size_of
from paceline.errors import UsageError

CHUNK = 16_384  # indices that rank 0 reads from a sampler and tells at a time


def mixed(*numbers: int) -> int:
    """Return a seed made of several numbers, such that neighbours have nothing in common."""
    words = np.random.SeedSequence([number % 2**64 for number in numbers])
    return int(words.generate_state(1, np.uint64)[0])


class Order(Protocol):
    """Where the units of a pass come from."""

    def prepare(self, units: int) -> None:
        """See to it that so many units since the beginning can be taken. Collective."""

    def take(self, count: int) -> Units:
        """Return the next units; fewer, or none, at the end."""


def draw(count: int, samples: int, seed: int) -> np.ndarray:
    """Draw so many of the indices 0 to samples - 1; ascending."""
    generator = torch.Generator().manual_seed(seed)
    drawn: np.ndarray = torch.randperm(samples, generator=generator)[:count].sort().values.numpy()
    return drawn


class LocalOrder:
    """The indices 0 to samples - 1, or those `drawn` of them, in order or shuffled by a seed."""

    def __init__(self, samples: int, seed: int | None, drawn: np.ndarray | None = None) -> None:
        self._indices: Any = range(samples) if drawn is None else drawn  # or an array
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            places = torch.randperm(samples, generator=generator).numpy()
            self._indices = places if drawn is None else drawn[places]
        self._taken = 0
        self.length = samples

    def prepare(self, units: int) -> None:
        """Nothing to do: all indices are there."""

    def units(self, start: int, stop: int) -> Units:
        """Return indices by their place in the order."""
        units: Units = self._indices[start:stop]
        return units

    def take(self, count: int) -> Units:
        """Return the next indices."""
        start, self._taken = self._taken, self._taken + count
        units: Units = self._indices[start : self._taken]
        return units


class ToldOrder:
    """What the sampler of rank 0 yields: indices, or lists of them."""

    def __init__(self, group: Group, sampler: Iterable[Any]) -> None:
        self._group, self._sampler = group, sampler
        self._source: Iterator[Any] | None = None
        self._failure: Exception | None = None
        self._told: list[Any] = []
        self._taken = 0
        self._has_ended = False

    def prepare(self, units: int) -> None:
        """Hear from rank 0 until so many units are here, or the sampler ends. Collective."""
        while not self._has_ended and self._taken + len(self._told) < units:
            units_told, self._has_ended, problem = take_from(
                self._group, self._read() if self._group.rank == 0 else None
            )
            if self._failure is not None:
                raise self._failure
            if problem is not None:
                raise UsageError(f"pl.shard: the sampler of rank 0 raised {problem}")
            self._told += map(restored, units_told)

    def take(self, count: int) -> Units:
        """Return the next units."""
        if count > len(self._told) and not self._has_ended:
            # To go on with what is there would end the pass early, on this rank alone.
            raise UsageError(
                "pl.shard: the loader asks for batches further ahead than its num_workers x"
                " prefetch_factor, as a plain DataLoader never does; pass one of those"
            )
        units = self._told[:count]
        del self._told[:count]
        self._taken += len(units)
        return units

    def _read(self) -> tuple[list[Any], bool, str | None]:
        """On rank 0: read a chunk. What the sampler raises is told, then raised on all ranks."""
        units, indices = list[Any](), 0
        try:
            self._source = iter(self._sampler) if self._source is None else self._source
            for unit in self._source:
                units.append(portable(unit))
                indices += size_of(units[-1])
                if indices >= CHUNK:
                    return units, False, None
        except Exception as error:
            self._failure = error
            return [], True, f"{type(error).__name__}: {error}"
        return units, True, None
