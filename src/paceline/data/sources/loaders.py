"""What the script passes to pl.shard, and what is kept about it from one pass to the next.

Besides a loader, pl.shard accepts a dataset or a list of files:

    pl.shard(dataset, batch_size=32, shuffle=True)                as DataLoader(dataset, ...)
    pl.shard(files, mode="partition", open=read, batch_size=32)   each worker opens its own

Both create a new loader at every call. A script may call pl.shard in its loop over epochs, and each
epoch needs another order. So passes are counted by the dataset, or by the list of files.

The RECORD of a loader lives as long as the loader. It must not refer to the loader, which would
then never be freed. Nor may a copy of the loader refer to the record: in a cycle, its processes
would be ended by the garbage collector, and not cleanly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from torch.utils.data import DataLoader, Dataset

from paceline.comm.group import Group
from paceline.errors import UsageError
from paceline.runtime import console

Made = TypeVar("Made")
Opener = Callable[[Any], Iterable[Any]]


@dataclass
class LoaderRecord:
    """What is kept about one loader."""

    next_epoch: int = 0
    seed: int | None = None  # the default seed, once the ranks have agreed on it
    logged: set[str] = field(default_factory=set)
    key: str | None = None  # in DataProgress
    kept: dict[str, Any] = field(default_factory=dict)  # by a mode, from pass to pass
    _copies: dict[Any, Any] = field(default_factory=dict)

    def copy_for(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return the copy of the loader with this key, or make it. At most one copy is kept: it
        may have processes."""
        if key not in self._copies:
            self._copies = {key: make()}
        made: Made = self._copies[key]
        return made


def log_once(logged: set[str], group: Group, text: str) -> None:
    """Log a line on rank 0, unless it was logged already."""
    if group.rank == 0 and text not in logged:
        logged.add(text)
        console.say(text)


_records: WeakKeyDictionary[Any, LoaderRecord] = WeakKeyDictionary()


def has_record(loader: Any) -> bool:
    """Return whether a loader has a record, by which it is recognized later."""
    try:
        return loader in _records
    except TypeError:
        return False


def record_of(loader: Any) -> LoaderRecord:
    """Return the record of this loader. Lists and some iterators cannot be keys and always get a
    new record; they have neither an order to shuffle nor workers to keep."""
    try:
        return _records.setdefault(loader, LoaderRecord())
    except TypeError:
        return LoaderRecord()


class FileList:
    """Files, how to read one, and the settings of the loader over them."""

    def __init__(self, files: Iterable[Any], opener: Opener, settings: Mapping[str, Any]) -> None:
        if isinstance(files, (str, bytes)):
            raise UsageError(f"open=...: expected a list of files, found the single name {files!r}")
        try:
            self.files = tuple(files)
        except TypeError:
            raise UsageError(f"open=...: expected a list of files, found {files!r:.60}") from None
        if not callable(opener):
            raise UsageError(
                f"open={opener!r:.60}: expected a function that reads a file, for each of its"
                " samples (with batch_size=) or batches (without)"
            )
        self.open = opener
        self.settings = {"batch_size": None, **settings}
        self.is_shuffled = bool(self.settings.pop("shuffle", False))
        if self.settings.get("persistent_workers"):
            raise UsageError(
                "persistent_workers=True: processes that read files are started in each epoch,"
                " which may have another order of files; leave it out"
            )


_made: WeakSet[DataLoader[Any]] = WeakSet()  # loaders over a dataset that was given
_passes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by dataset
_file_passes: dict[tuple[str, ...], int] = {}


def prepare(
    thing: Any, opener: Opener | None, settings: Mapping[str, Any]
) -> tuple[Any, str | None]:
    """Return the loader to shard, and the problem with it, which all ranks raise."""
    try:
        made = _made_of(thing, opener, settings)
    except (UsageError, TypeError, ValueError) as error:  # those of DataLoader's own
        return thing, str(error)
    if made is not thing:
        record_of(made).next_epoch = _count(made)
    return made, None


def record_pass(made: Any, next_epoch: int) -> None:
    """Record the number of passes over a dataset or a list of files."""
    if isinstance(made, FileList):
        _file_passes[_names(made)] = next_epoch
    elif isinstance(made, DataLoader) and made in _made:
        try:
            _passes[made.dataset] = next_epoch
        except TypeError:  # it has no hash: passes are not counted
            return


def _made_of(thing: Any, opener: Opener | None, settings: Mapping[str, Any]) -> Any:
    if opener is not None:
        return FileList(thing, opener, settings)
    if not settings:
        return thing
    if not isinstance(thing, Dataset):
        raise UsageError(
            f"{', '.join(settings)}: pl.shard has no such argument; arguments of a DataLoader go"
            f" with a dataset, but this is a {type(thing).__name__}: set them where it is created"
        )
    if not {"batch_size", "batch_sampler"} & set(settings):
        raise UsageError(
            f"a {type(thing).__name__} without batch_size; pass batch_size=..., or a DataLoader"
        )
    loader = DataLoader(thing, **settings)
    _made.add(loader)
    return loader


def _count(made: Any) -> int:
    if isinstance(made, FileList):
        return _file_passes.get(_names(made), 0)
    try:
        return _passes.get(made.dataset, 0)
    except TypeError:
        return 0


def _names(made: FileList) -> tuple[str, ...]:
    return tuple(map(str, made.files))
