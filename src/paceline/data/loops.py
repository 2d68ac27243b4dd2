"""`pl.steps(n)` and `pl.epochs(n)`: like range(n), but a newcomer starts where the others are, and
a run that is resumed from a checkpoint where that was made.

Either way the script begins at the top. What it would do there in earlier rounds of a loop is over;
these loops leave that out, so that nothing is done again, or alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from paceline.data.ledger import ledger_of
from paceline.data.randomness import seed_step
from paceline.errors import UsageError
from paceline.job import current


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
        loop, first = ledger.open_loop(self._count, counts_steps=counts_steps)
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
