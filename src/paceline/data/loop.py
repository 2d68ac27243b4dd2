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

    def pack(self, *, is_between_steps: bool = False) -> list[Any]:
        """Return where a newcomer begins: an item and its place; None stands for here and now.
        Between two steps an item in which anything was taken is done."""
        has_stepped = self._has_committed or (is_between_steps and self.has_taken)
        is_done = self._counts_steps and has_stepped
        place = None if is_done else {**self._place, "given": self._given}
        return [self.number, self.index + is_done, place]
