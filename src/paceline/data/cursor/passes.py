"""One pass over one loader: who the workers are, what was agreed on, and what is handed out.

In lockstep the k-th global batch is cut among the workers that are there. Under a free-running pace
nobody waits for anybody, so nothing is cut anew: the data is shared by number among as many workers
as the job was started with, and whoever takes over a number goes on where its steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from paceline.comm.group import Group
from paceline.data.agreement import agree
from paceline.data.cursor.cursor import Cursor, Facts
from paceline.data.cursor.ledger import Ledger
from paceline.data.cursor.loader_state import Line
from paceline.data.randomness import Seeds, as_then, remembered
from paceline.data.sources.loaders import Memory
from paceline.data.sources.samples import samples_in
from paceline.data.split.order import KeptOrder, LocalOrder
from paceline.data.split.plan import Plan
from paceline.errors import named
from paceline.runtime.batch_weight import Announcer
from paceline.runtime.job import Job


@dataclass(frozen=True)
class Pass:
    """What there is to know about one pass; in a job that is not elastic the workers stay."""

    job: Job  # as those see it who have batches of their own
    group: Group  # of the data
    ledger: Ledger
    line: Line
    memory: Memory
    announcer: Announcer
    say: Callable[[str], None]  # once for each loader
    facts: Facts  # what the ranks agreed on about the loader
    epoch: int
    seed: int
    lookahead: int  # batches that some worker's loader may ask for ahead of time
    pad: bool
    resize: str

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

    def order(self, plan: Plan, group: Group | None) -> LocalOrder | KeptOrder:
        """Return the order of a loader with indices; a sampler of the user is told in `group`, or
        iterated by each worker."""
        if plan.told is None:
            return plan.local_order(self.seed, self.epoch)
        return KeptOrder(group, plan.told, self.together)

    # -- in the ledger ------------------------------------------------------------------------

    def open(self, cursor: Cursor) -> None:
        """Begin the pass, or come into it where the others are."""
        cursor.index, cursor.epoch = self.line.my_passes, self.epoch
        cursor.counts, cursor.facts = self.pad, self.facts
        if self.is_free:
            self.line.leave_others()  # their places are not ours
        self.ledger.begin(self.line, cursor)

    def close(self, cursor: Cursor) -> None:
        """End the pass."""
        if not self.is_elastic:
            cursor.commit(cursor.position)  # nothing of it comes again
        self.line.end(cursor)

    def noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass that knows nothing of the ledger. Continued from a
        checkpoint, it is made again from its beginning, without what was used."""
        cursor = Cursor(self.members)
        self.open(cursor)
        is_resumed = cursor.is_resumed
        if not is_resumed:
            cursor.draws = remembered(())
        try:
            with as_then(cursor.draws if is_resumed else None, ()):
                for _ in islice(batches, cursor.position if is_resumed else 0):
                    pass
            for batch in batches:
                self.ledger.note_take()
                cursor.use(cursor.position)
                cursor.position += 1
                cursor.tally.largest = max(cursor.tally.largest, samples_in(batch))
                yield batch
        finally:
            self.close(cursor)

    def done(self, cursor: Cursor) -> int:
        """Return how many batches have counted, and are not needed again."""
        return cursor.committed if self.is_elastic and cursor.counts else cursor.position

    def place_of_number(self, cursor: Cursor, batches: int | None) -> int:
        """Free-running, as a newcomer: how many batches of the pass this worker's number has done,
        if a pass has so many and each step takes one."""
        steps = self.job.elastic.committed_steps
        if cursor.is_resumed:
            return cursor.position
        if steps is None or batches is None or not self.pad:
            return 0
        return min(max(0, steps - batches * cursor.index), batches)

    # -- with the others ----------------------------------------------------------------------

    def together(self, attempt: Callable[[], Any]) -> Any:
        """Take a collective step; it is repeated if somebody is lost."""
        return self.job.elastic.point(attempt)

    def meet(self) -> None:
        """Wait for the others at the end of a pass, where losses are noticed."""
        with self.job.reporter.waiting:
            self.together(lambda: self.group.barrier())


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
