"""How much of its loops a script has behind it, so that others can say how long the rest will take.

Counted from outside to inside: the rounds of pl.epochs and pl.steps, then the batches of the pass
over a loader for training that is under way. A script with neither says nothing.

Threads: one that trains counts, any may read.
"""

from __future__ import annotations


class Round:
    """One loop that is under way."""

    __slots__ = ("count", "index")

    def __init__(self, count: int) -> None:
        self.index, self.count = 0, count


class Headway:
    """Where one process is in its script."""

    def __init__(self) -> None:
        self._rounds: tuple[Round, ...] = ()  # the outermost loop first; replaced whole
        self._taken = self._length = 0  # batches of the pass; a length of 0 is not known

    def enter(self, count: int) -> Round:
        """A loop of so many rounds begins, in those that are under way."""
        entered = Round(count)
        self._rounds = (*self._rounds, entered)
        return entered

    def begin(self, entered: Round, index: int) -> None:
        """A round of a loop begins."""
        entered.index = index
        self._taken = self._length = 0

    def leave(self, left: Round) -> None:
        """A loop has ended."""
        self._rounds = tuple(one for one in self._rounds if one is not left)

    def begin_pass(self, length: int | None) -> None:
        """A pass over a loader for training begins; None: nobody knows how long it is."""
        self._taken, self._length = 0, length or 0

    def take_batch(self) -> None:
        """A batch of the pass is used."""
        self._taken += 1

    def percent(self) -> float | None:
        """Return how much is behind; None outside of all loops."""
        rounds, taken, length = self._rounds, self._taken, self._length
        done, size = 0.0, 100.0
        for one in rounds:
            size /= max(one.count, 1)
            done += size * one.index
        if length:
            done += size * min(1.0, max(0, taken - 1) / length)  # the last one is still in work
        return done if rounds else None
