"""Data that only comes in sequence: nobody knows its length, and nobody can ask for sample 17.

Of one stream that all workers read, each takes every world-size-th sample (or item): STRIDING.
Streams that already differ from worker to worker are taken as they are: PRESHARDED. Either way the
workers may have different numbers of samples, and learn that only when theirs end; so before each
step they tell each other how many samples they have for it. From these follow the weights, and when
it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.collectives.group import Group
from paceline.contribution import Announcer
from paceline.data.reading import Reading
from paceline.data.samples import named_items
from paceline.data.split import stride, weight
from paceline.errors import DataError
from paceline.telemetry.stopwatch import Stopwatch

Counted = tuple[int, Any]  # samples of a batch, and the batch
_ENDED = -1


class Strided(IterableDataset[Any]):
    """A stream of which only this worker's samples are left. Everything else is the dataset's own:
    a worker_init_fn that sets attributes of `get_worker_info().dataset` reaches the dataset."""

    def __init__(
        self,
        dataset: Any,
        world_size: int,
        rank: int,
        per_step: int,
        readings: Mapping[int, Reading] | None = None,  # by process of the loader: what is left
    ) -> None:
        object.__setattr__(self, "_strided", (dataset, world_size, rank, per_step, readings))

    def __iter__(self) -> Iterator[Any]:
        dataset, *numbers, readings = self._strided
        is_mine, who = stride(*numbers), f"worker {numbers[1]} of {numbers[0]}"
        samples = named_items(dataset, "sample", who)
        if not readings:
            return (sample for position, sample in enumerate(samples) if is_mine(position))
        info = get_worker_info()
        number_of = readings.get(0 if info is None else info.id, Reading()).numbering()
        numbered = ((number_of(position), sample) for position, sample in enumerate(samples))
        return (sample for number, sample in numbered if number is not None and is_mine(number))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_strided")[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._strided[0], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Strided, self._strided


class Counting:
    """A collate function that also says how many samples it was given."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Counted:
        return len(samples), self._collate(samples)


def counted(batches: Iterable[Any]) -> Iterator[Counted]:
    """Yield batches together with the number of samples in each."""
    return ((samples_in(batch), batch) for batch in batches)


def samples_in(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor or array in a batch; without any,
    the length of the list that the batch is, or 1."""
    found = next(_first_dimensions(batch), None)
    if found is not None:
        return found
    return len(batch) if isinstance(batch, (list, tuple)) else 1


def _first_dimensions(thing: Any) -> Iterator[int]:
    shape = getattr(thing, "shape", None)
    if isinstance(shape, tuple):
        yield from shape[:1]
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _first_dimensions(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _first_dimensions(value)


def in_step(
    batches: Iterator[Counted],
    group: Group,
    announcer: Announcer,
    *,
    pad: bool,
    stops_short: bool,
    too_few: str,
    waiting: Stopwatch,
) -> Iterator[Any]:
    """Yield batches until all workers have run out; one that has run out repeats its last batch
    with weight 0, or without `pad` waits for the others. With `stops_short` the first that runs
    out ends it for all. `waiting` gets the time for which this worker waits for the others."""
    last, is_first = None, True
    while True:
        mine = next(batches, None)
        with waiting:
            counts = _tell(group, _ENDED if mine is None else mine[0])
        missing = [rank for rank, count in zip(group.ranks, counts, strict=True) if count < 0]
        if is_first and missing and (pad or len(missing) == group.size):
            raise DataError(f"pl.shard: {_named(missing, group.size)} no batch at all; {too_few}")
        if len(missing) == group.size or (missing and stops_short):
            return
        is_first = False
        if mine is not None:
            count, last = mine
            announcer.set(weight(count, sum(c for c in counts if c > 0), group.size), count)
            yield last
        elif pad:
            announcer.set(0.0)
            yield last


def _tell(group: Group, count: int) -> list[int]:
    counts = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(torch.tensor([count]), out=counts)
    return counts.tolist()


def _named(missing: list[int], world_size: int) -> str:
    if len(missing) == world_size:
        return "the loader gives"
    return f"the loader gives rank {', '.join(map(str, missing))} of {world_size}"
