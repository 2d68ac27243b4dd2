"""Samples of a user's dataset: errors with the place where they happened, seeds, and counting.

Of thousands of samples one cannot be read, on one of many workers, perhaps in a process of its
DataLoader. What the dataset raised does not say which. So it is raised again as a DataError that
names the sample, the rank and the process, with the dataset's own traceback behind it. The other
ranks end with this one: the launcher names it as the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import get_worker_info

from paceline.data.randomness import seed_everything
from paceline.errors import DataError


class Named:
    """A dataset whose errors say which sample and where. Everything else is the dataset's own: a
    worker_init_fn that sets attributes of `get_worker_info().dataset` reaches the dataset."""

    def __init__(self, dataset: Any, who: str) -> None:
        object.__setattr__(self, "_named", (dataset, who))

    def __getitem__(self, index: Any) -> Any:
        dataset, who = self._named
        try:
            return dataset[index]
        except Exception as error:
            raise refused(f"sample {index!r:.80}", dataset, who, error) from error

    def __getitems__(self, indices: Iterable[Any]) -> Any:
        dataset, who = self._named
        index: Any = None
        if callable(getattr(dataset, "__getitems__", None)):
            try:
                return dataset.__getitems__(indices)
            except Exception as error:
                raise refused(
                    f"one of the samples {indices!r:.200}", dataset, who, error
                ) from error
        made = []
        try:
            for index in indices:
                made.append(dataset[index])  # to know which one
        except Exception as error:
            raise refused(f"sample {index!r:.80}", dataset, who, error) from error
        return made

    def __len__(self) -> int:
        return len(self._named[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_named")[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._named[0], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._named


class Reseeding(Named):
    """A dataset that is asked for (seed, indices), and seeds before it makes the samples."""

    def __init__(self, dataset: Any, who: str = "this rank") -> None:
        super().__init__(dataset, who)

    def __getitems__(self, request: tuple[int, Iterable[Any]]) -> Any:  # type: ignore[override]
        seed, indices = request
        seed_everything(seed)
        return super().__getitems__(indices)

    def __getitem__(self, request: tuple[int, Any]) -> Any:
        seed, index = request
        seed_everything(seed)
        return super().__getitem__(index)


def named_items(items: Iterable[Any], what: str, who: str) -> Iterator[Any]:
    """Yield what an iterable yields; its errors say behind how many items they came."""
    number = 0
    try:
        for item in items:
            yield item
            number += 1
    except Exception as error:
        raise refused(f"{what} {number}", items, who, error) from error


def refused(what: str, source: Any, who: str, error: Exception) -> DataError:
    """Return the error that says what could not be made, and where."""
    info = get_worker_info()
    where = who if info is None else f"{who}, DataLoader worker {info.id}"
    return DataError(
        f"pl.shard: {what} of {type(source).__name__} could not be made on {where}:"
        f" {type(error).__name__}: {error}"
    )


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
