"""A pass as the ledger knows it: who the workers are, what was agreed on, and what is handed out.

In lockstep the k-th global batch is cut among the workers that are there. Under a free-running pace
nobody waits for anybody, so nothing is cut anew: the data is shared by number among as many workers
as the job was started with, and whoever takes over a number goes on where its steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from paceline.data.consensus import agree, group_of
from paceline.data.draws import as_then, remembered
from paceline.data.ledger import Ledger
from paceline.data.line import Line
from paceline.data.passage import AnyCourse, Count, Passage
from paceline.data.repeatable import Seeds
from paceline.data.stream import samples_in
from paceline.data.told import KeptOrder
from paceline.errors import named
from paceline.job import Job


@dataclass(frozen=True)
class ElasticPass:
    """One pass over one loader; in a job that is not elastic the workers stay the same."""

    job: Job
    ledger: Ledger
    line: Line
    resize: str
    seed: int
    epoch: int
    pad: bool
    facts: Mapping[str, Any]  # what the ranks agreed on about the loader

    @property
    def is_elastic(self) -> bool:
        """Whether workers may come and go."""
        return self.job.elastic.is_on

    @property
    def is_free(self) -> bool:
        """Whether nobody waits for anybody."""
        return not self.job.elastic.is_lockstep

    @property
    def nominal(self) -> int:
        """How many workers the job was started with."""
        return self.job.env.world_size

    @property
    def members(self) -> tuple[int, ...]:
        """Among whom the data is cut: ranks, or numbers where everybody runs free."""
        return tuple(range(self.nominal)) if self.is_free else self.job.fabric.membership.workers

    @property
    def seat(self) -> int:
        """This worker among them."""
        return self.job.env.number % self.nominal if self.is_free else self.job.env.rank

    @property
    def seeds(self) -> Seeds | None:
        """Random numbers by place for what the script computes, where a replacement must draw them
        again."""
        return self.making if self.job.env.on_loss == "replace" else None

    @property
    def making(self) -> Seeds:
        """Random numbers by place, for the dataset."""
        return Seeds(self.seed, self.job.data_number, self.epoch)

    def open(self, course: AnyCourse, order: KeptOrder | None = None) -> Passage:
        """Begin the pass, or come into it where the others are."""
        line = self.line
        passage = Passage(line.my_passes, self.epoch, self.pad, course, order, self.facts)
        if self.is_free:
            line.told.clear()  # the others' places are not ours
            line.replayed = 0
        self.ledger.begin(line, passage)
        return passage

    def noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass that knows nothing of the ledger. Continued from a
        checkpoint, it is made again from its beginning, without what was used."""
        course = Count()
        passage = self.open(course)
        is_resumed = passage.is_resumed
        if not is_resumed:
            passage.draws = remembered(())
        try:
            with as_then(passage.draws if is_resumed else None, ()):
                for _ in islice(batches, passage.cursor if is_resumed else 0):
                    pass
            for batch in batches:
                self.ledger.note_take()
                course.use(passage.cursor)
                passage.cursor += 1
                passage.tally.largest = max(passage.tally.largest, samples_in(batch))
                yield batch
        finally:
            self.close(passage)

    def done(self, passage: Passage) -> int:
        """Return how many batches have counted, and are not needed again."""
        is_kept = self.is_elastic and passage.counts
        return passage.course.committed if is_kept else passage.cursor

    def close(self, passage: Passage) -> None:
        """End the pass."""
        if not self.is_elastic:
            passage.course.commit(passage.cursor)  # nothing of it comes again
        self.line.end(passage)

    def place_of_number(self, passage: Passage, batches: int | None) -> int:
        """Free-running, as a newcomer: how many batches of the pass this worker's number has done,
        if a pass has so many and each step takes one."""
        steps = self.job.elastic.committed_steps
        if passage.is_resumed:
            return passage.cursor
        if steps is None or batches is None or not self.pad:
            return 0
        return min(max(0, steps - batches * passage.index), batches)

    def together(self, attempt: Callable[[], Any]) -> Any:
        """Take a collective step; it is repeated if somebody is lost."""
        return self.job.elastic.point(attempt)

    def meet(self) -> None:
        """Wait for the others at the end of a pass, where losses are noticed."""
        group = group_of(self.job)
        with self.job.reporter.waiting:
            self.together(lambda: group.barrier())


def agree_in_line(
    job: Job, line: Line, problem: str | None, facts: dict[str, Any], aside: dict[str, Any]
) -> list[dict[str, Any]]:
    """As `agree`, but only when a loader is given for the first time and when a pass begins: a
    newcomer gives its loaders when the others have done so, and comes into a pass that is open.
    Who runs free asks nobody. Nor does one that continues a pass from a checkpoint, in any job:
    where everybody runs free, others may have ended it then."""
    is_call, elastic = facts.get("the epoch of this pass") is None, job.elastic
    if not elastic.is_on:
        is_known = not is_call and line.saved is not None
    else:
        is_known = bool(line.answers) if is_call else line.is_pass_known or line.saved is not None
        is_known = is_known or elastic.is_candidate or not elastic.is_lockstep
    if not is_known:
        told, first = agree(job, problem, facts, aside), line.answers
        if first:
            told[0]["seed"] = first[0]["seed"]  # the script may have seeded anew since
        line.answers = told
    elif problem is not None:
        raise named(aside["problem"], f"pl.shard: {problem}")
    return line.answers or [aside]
