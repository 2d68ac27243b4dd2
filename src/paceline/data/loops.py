"""`pl.steps(n)` and `pl.epochs(n)`: like range(n), but a newcomer starts where the others are, and
a run that is resumed from a checkpoint where that was made.

Either way the script begins at the top. What it would do there in earlier rounds of a loop is over;
these loops leave that out, so that nothing is done again, or alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from paceline.data.cursor.ledger import ledger_of
from paceline.data.randomness import seed_step
from paceline.errors import UsageError
from paceline.runtime.job import current


def steps(count: int) -> Rounds:
    """Return an iterable over the numbers of so many optimizer steps: 0 to count - 1. In an elastic
    job a newcomer begins with the step that comes next for all; a resumed run goes on with the one
    behind its checkpoint.

    >>> list(pl.steps(3))
    [0, 1, 2]
    """
    return Rounds("steps", count)


def epochs(count: int) -> Rounds:
    """Return an iterable over the numbers of so many epochs: 0 to count - 1. In an elastic job a
    newcomer begins with the epoch that is under way; a resumed run with that of its checkpoint.

    >>> list(pl.epochs(2))
    [0, 1]
    """
    return Rounds("epochs", count)


class Loop:
    """How far one loop of pl.steps or pl.epochs is, for those who come into it later."""

    def __init__(self, *, counts_steps: bool) -> None:
        self.number = 0  # among the loops of the script
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

    def under_way(self) -> list[Any]:
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


class Rounds:
    """The rounds of a loop; every iteration is a loop of its own."""

    def __init__(self, kind: str, count: int) -> None:
        current()
        self._kind = kind
        try:
            self._count = operator.index(count)
        except TypeError:
            raise UsageError(f"pl.{kind}({count!r}): expected a whole number") from None
        if self._count < 0:
            raise UsageError(f"pl.{kind}({count}): expected 0 or more")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        job = current().sharers
        ledger = ledger_of(job)
        job.elastic.enter()
        counts_steps = self._kind == "steps"
        loop = Loop(counts_steps=counts_steps)
        first = ledger.open_loop(loop, self._count)
        if counts_steps and not (job.elastic.is_lockstep or ledger.is_resumed):
            done = job.elastic.committed_steps  # of the number that this worker has taken over
            first = first if done is None else min(done, self._count)
        repeats = counts_steps and job.env.on_loss == "replace"
        headway = job.reporter.headway
        entered = headway.enter(self._count)
        try:
            for index in range(first, self._count):
                headway.begin(entered, index)
                ledger.begin_item(loop, index)
                if repeats:
                    seed_step(ledger.script_seed, job.data_number, index)
                yield index
        finally:
            headway.leave(entered)
            ledger.close_loop(loop)
