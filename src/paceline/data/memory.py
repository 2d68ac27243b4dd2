"""What is kept about a loader from one pass to the next, for as long as the loader lives.

Nothing in here may hold the loader itself, or it would live for ever. Nor may a loader's copy hold
this memory: in a cycle, its processes would be ended by the garbage collector, in no good order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from paceline import console
from paceline.collectives.group import Group

Made = TypeVar("Made")


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
