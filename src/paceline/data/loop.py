"""How far one loop of pl.steps or pl.epochs is, for those who come into it later."""

from __future__ import annotations

from typing import Any


class Loop:
    """One loop of pl.steps or pl.epochs."""

    def __init__(self, number: int, *, counts_steps: bool) -> None:
        self.number = number
        self._counts_steps = counts_steps
        self._has_committed = False
        self.has_taken = False  # a batch, since then
        self.index = 0  # item under way
        self._place: dict[str, Any] = {}  # where the script was when that began
        self._given: list[str] = []  # loaders given since then, by the order of the first time

    def begin(self, index: int, place: dict[str, Any]) -> None:
        """Note that an item begins."""
        self.index, self._place, self._has_committed = index, place, False
        self.has_taken = False
        self._given = []

    def give(self, key: str) -> None:
        """Note that a loader was given to pl.shard."""
        if key not in self._given:
            self._given.append(key)

    def commit(self) -> None:
        """Note that a step has counted."""
        self._has_committed = True

    def pack(self) -> list[Any]:
        """Return where a newcomer begins: an item and its place; None stands for here and now."""
        return self._begin_at(is_done=self._counts_steps and self._has_committed)

    def state(self, *, is_in_pass: bool) -> list[Any]:
        """Return the same for a checkpoint, which is made behind everything that belongs to a step.
        An epoch in which anything was taken is done, unless a pass is under way."""
        is_done = self._has_committed or self.has_taken
        if not self._counts_steps:
            is_done = self.has_taken and not is_in_pass
        return self._begin_at(is_done=is_done)

    def _begin_at(self, *, is_done: bool) -> list[Any]:
        place = None if is_done else {**self._place, "given": self._given}
        return [self.number, self.index + is_done, place]
