"""Samples of a user's dataset: errors that name the sample, seeds, and counting.

One of thousands of samples cannot be read, on one of many workers, perhaps in a process of its
DataLoader. The dataset's own exception does not name it. So it is raised again as a DataError that
names the sample, the rank and the process, chained to the dataset's exception. The launcher ends
the other ranks and names this one as the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import get_worker_info

from paceline.data.randomness import seed_everything
from paceline.errors import DataError


class DatasetWrapper:
    """A dataset with some methods replaced. Everything else is delegated: a worker_init_fn that
    sets attributes of `get_worker_info().dataset` reaches the dataset."""

    def __init__(self, *arguments: Any) -> None:
        object.__setattr__(self, "_wrapped", arguments)  # the dataset first

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_wrapped")[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped[0], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._wrapped


class ErrorReportingDataset(DatasetWrapper):
    """A dataset whose errors name the sample and the process."""

    def __init__(self, dataset: Any, where: str = "this rank") -> None:
        super().__init__(dataset, where)

    def __getitem__(self, index: Any) -> Any:
        dataset, where = self._wrapped
        try:
            return dataset[index]
        except Exception as error:
            raise sample_error(f"sample {index!r:.80}", dataset, where, error) from error

    def __getitems__(self, indices: Iterable[Any]) -> Any:
        dataset, where = self._wrapped
        index: Any = None
        if callable(getattr(dataset, "__getitems__", None)):
            try:
                return dataset.__getitems__(indices)
            except Exception as error:
                raise sample_error(
                    f"one of the samples {indices!r:.200}", dataset, where, error
                ) from error
        made = []
        try:
            for index in indices:
                made.append(dataset[index])  # one by one, to know which one fails
        except Exception as error:
            raise sample_error(f"sample {index!r:.80}", dataset, where, error) from error
        return made

    def __len__(self) -> int:
        return len(self._wrapped[0])


class ReseedingDataset(ErrorReportingDataset):
    """A dataset that is indexed by (seed, indices), and seeds before it makes the samples."""

    def __getitems__(self, request: tuple[int, Iterable[Any]]) -> Any:  # type: ignore[override]
        seed, indices = request
        seed_everything(seed)
        return super().__getitems__(indices)

    def __getitem__(self, request: tuple[int, Any]) -> Any:
        seed, index = request
        seed_everything(seed)
        return super().__getitem__(index)


def annotate_errors(items: Iterable[Any], what: str, where: str) -> Iterator[Any]:
    """Yield the items of an iterable; its errors name the index of the item."""
    number = 0
    try:
        for item in items:
            yield item
            number += 1
    except Exception as error:
        raise sample_error(f"{what} {number}", items, where, error) from error


def sample_error(what: str, source: Any, where: str, error: Exception) -> DataError:
    """Return the error that says what could not be made, and where."""
    info = get_worker_info()
    where = where if info is None else f"{where}, DataLoader worker {info.id}"
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
