"""`pl.steps(n)` and `pl.epochs(n)`: range(n) for elastic and resumable jobs.

A newcomer's loop starts where the other workers are; the loop of a resumed run starts where its
checkpoint was saved. Either way the script starts at the top. These loops skip earlier items, so
that no step is done twice, or by one worker alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from paceline.data.cursor.progress import data_progress_of
from paceline.data.randomness import seed_step
from paceline.errors import UsageError
from paceline.runtime.job import current


def steps(count: int) -> LoopRange:
    """Return an iterable over the numbers of so many optimizer steps: 0 to count - 1. In an elastic
    job a newcomer starts with the next step of the other workers; a resumed run with the first step
    after its checkpoint.

    >>> list(pl.steps(3))
    [0, 1, 2]
    """
    return LoopRange("steps", count)


def epochs(count: int) -> LoopRange:
    """Return an iterable over the numbers of so many epochs: 0 to count - 1. In an elastic job a
    newcomer starts with the epoch that is under way; a resumed run with that of its checkpoint.

    >>> list(pl.epochs(2))
    [0, 1]
    """
    return LoopRange("epochs", count)


class LoopState:
    """Progress of one loop of pl.steps or pl.epochs, for workers that enter it later."""

    def __init__(self, *, counts_steps: bool) -> None:
        self.number = 0  # among the loops of the script
        self._counts_steps = counts_steps
        self._has_committed = False
        self.has_taken = False  # a batch, since then
        self.index = 0  # the current item
        self._position: dict[str, Any] = {}  # of the script when the item began
        self._given: list[str] = []  # loaders passed to pl.shard since then

    def begin(self, index: int, position: dict[str, Any]) -> None:
        """Note that an item begins."""
        self.index, self._position, self._has_committed = index, position, False
        self.has_taken = False
        self._given = []

    def add_loader(self, key: str) -> None:
        """Note that the script passed a loader to pl.shard."""
        if key not in self._given:
            self._given.append(key)

    def commit(self) -> None:
        """Note that a step has counted."""
        self._has_committed = True

    def live(self) -> list[Any]:
        """Return where a newcomer starts: loop, item, and position; None is the current one."""
        return self._start_at(is_done=self._counts_steps and self._has_committed)

    def state(self, *, is_in_pass: bool) -> list[Any]:
        """Return where a run starts that resumes from a checkpoint after this step. An epoch in
        which a batch was taken is done, unless a pass is under way."""
        is_done = self._has_committed or self.has_taken
        if not self._counts_steps:
            is_done = self.has_taken and not is_in_pass
        return self._start_at(is_done=is_done)

    def _start_at(self, *, is_done: bool) -> list[Any]:
        position = None if is_done else {**self._position, "given": self._given}
        return [self.number, self.index + is_done, position]


class LoopRange:
    """What pl.steps and pl.epochs return. Every iteration is a loop of its own."""

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
        job = current().batch_view
        progress = data_progress_of(job)
        job.elastic.join_running_job()
        counts_steps = self._kind == "steps"
        loop = LoopState(counts_steps=counts_steps)
        first = progress.open_loop(loop, self._count)
        if counts_steps and not (job.elastic.is_lockstep or progress.is_resumed):
            done = job.elastic.committed_steps  # by this worker's number
            first = first if done is None else min(done, self._count)
        repeats = counts_steps and job.env.on_loss == "replace"
        loop_progress = job.reporter.loop_progress
        entered = loop_progress.enter(self._count)
        try:
            for index in range(first, self._count):
                loop_progress.begin(entered, index)
                progress.begin_item(loop, index)
                if repeats:
                    seed_step(progress.script_seed, job.data_number, index)
                yield index
        finally:
            loop_progress.leave(entered)
            progress.close_loop(loop)
