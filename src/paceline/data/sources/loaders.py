"""What is given to pl.shard, and what is kept about it from one pass to the next.

Besides a loader, a dataset or a list of files may be given:

    pl.shard(dataset, batch_size=32, shuffle=True)                as DataLoader(dataset, ...)
    pl.shard(files, mode="partition", open=read, batch_size=32)   each worker opens its own

Both are a new thing at every call; so that a script which calls pl.shard in its loop over epochs is
not given the same order in each, the passes are counted by the dataset, or by the list of files.

The MEMORY of a loader lives as long as the loader. Nothing in it may hold the loader itself, or it
would live for ever. Nor may a loader's copy hold the memory: in a cycle, its processes would be
ended by the garbage collector, in no good order.
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
class Memory:
    """The state of one loader."""

    next_epoch: int = 0
    seed: int | None = None  # the default seed, once the ranks have agreed on it
    said: set[str] = field(default_factory=set)
    line: str | None = None  # of the ledger
    kept: dict[str, Any] = field(default_factory=dict)  # by a mode, from pass to pass
    _copies: dict[Any, Any] = field(default_factory=dict)

    def copy_for(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return the copy of the loader that was made for this purpose, or make it. At most one is
        kept: it may have processes."""
        if key not in self._copies:
            self._copies = {key: make()}
        made: Made = self._copies[key]
        return made


def say_once(said: set[str], group: Group, text: str) -> None:
    """Write one line for the person who started the job, unless it was said already."""
    if group.rank == 0 and text not in said:
        said.add(text)
        console.say(text)


_memories: WeakKeyDictionary[Any, Memory] = WeakKeyDictionary()


def is_remembered(loader: Any) -> bool:
    """Say whether a loader will be known again when it comes a second time."""
    try:
        return loader in _memories
    except TypeError:
        return False


def memory_of(loader: Any) -> Memory:
    """Return the memory of this loader. Lists and some iterators cannot be remembered and always
    get a new one; they have neither an order to shuffle nor workers to keep."""
    try:
        return _memories.setdefault(loader, Memory())
    except TypeError:
        return Memory()


class FileList:
    """Files, how to read one, and the settings of the loader over them."""

    def __init__(self, files: Iterable[Any], opener: Opener, settings: Mapping[str, Any]) -> None:
        if isinstance(files, (str, bytes)):
            raise UsageError(f"open=...: expected a list of files, found the one name {files!r}")
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


def given(thing: Any, opener: Opener | None, settings: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Return what is to be shared out, and what is wrong with it, which all ranks shall hear."""
    try:
        made = _made_of(thing, opener, settings)
    except (UsageError, TypeError, ValueError) as error:  # those of DataLoader's own
        return thing, str(error)
    if made is not thing:
        memory_of(made).next_epoch = _count(made)
    return made, None


def note_pass(made: Any, next_epoch: int) -> None:
    """Remember how often a dataset or a list of files has been gone over."""
    if isinstance(made, FileList):
        _file_passes[_names(made)] = next_epoch
    elif isinstance(made, DataLoader) and made in _made:
        try:
            _passes[made.dataset] = next_epoch
        except TypeError:  # it has no hash: as if it were another one each time
            return


def _made_of(thing: Any, opener: Opener | None, settings: Mapping[str, Any]) -> Any:
    if opener is not None:
        return FileList(thing, opener, settings)
    if not settings:
        return thing
    if not isinstance(thing, Dataset):
        raise UsageError(
            f"{', '.join(settings)}: pl.shard has no such argument; those of a DataLoader go with a"
            f" dataset, but this is a {type(thing).__name__}: set them where it is made"
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
