"""What a pass in an elastic job needs besides: who the workers are, and what was agreed on.

In lockstep the k-th global batch is cut among the workers that are there. Under a free-running pace
nobody waits for anybody, so nothing is cut anew: the data is shared by number among as many workers
as the job was started with, and whoever takes over a number goes on where its steps are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.data.consensus import agree, group_of
from paceline.data.ledger import Ledger
from paceline.data.passage import AnyCourse, Line, Passage
from paceline.data.repeatable import Seeds
from paceline.data.told import KeptOrder
from paceline.errors import UsageError
from paceline.job import Job


@dataclass(frozen=True)
class ElasticPass:
    """One pass over one loader in an elastic job."""

    job: Job
    ledger: Ledger
    line: Line
    resize: str
    seed: int
    epoch: int
    pad: bool

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
        """Random numbers by place, where a replacement must draw them again."""
        repeats = self.job.env.on_loss == "replace"
        return Seeds(self.seed, self.job.env.number, self.epoch) if repeats else None

    def open(self, course: AnyCourse, order: KeptOrder | None = None) -> Passage:
        """Begin the pass, or come into it where the others are."""
        line = self.line
        passage = Passage(line.my_passes, self.epoch, self.pad, course, order)
        if self.is_free:
            line.told.clear()  # the others' places are not ours
            line.begin(passage)
        else:
            self.ledger.begin(line, passage)
        return passage

    def close(self, passage: Passage) -> None:
        """End the pass."""
        self.line.end(passage)

    def place_of_number(self, passage: Passage, batches: int | None) -> int:
        """Free-running, as a newcomer: how many batches of the pass this worker's number has done,
        if a pass has so many and each step takes one."""
        steps = self.job.elastic.committed_steps
        if steps is None or batches is None or not self.pad:
            return 0
        return min(max(0, steps - batches * passage.index), batches)

    def together(self, attempt: Callable[[], Any]) -> Any:
        """Take a collective step; it is repeated if somebody is lost."""
        return self.job.elastic.point(attempt)

    def meet(self) -> None:
        """Wait for the others at the end of a pass, where losses are noticed."""
        group = group_of(self.job)
        self.together(lambda: group.barrier())


def agree_in_line(
    job: Job, line: Line, problem: str | None, facts: dict[str, Any], aside: dict[str, Any]
) -> list[dict[str, Any]]:
    """As `agree`, but only when a loader is given for the first time and when a pass begins: a
    newcomer gives its loaders when the others have done so, and comes into a pass that is open.
    Who runs free asks nobody."""
    is_call = facts.get("the epoch of this pass") is None
    is_known = bool(line.answers) if is_call else line.is_pass_known
    if not (job.elastic.is_candidate or is_known or not job.elastic.is_lockstep):
        told, first = agree(job, problem, facts, aside), line.answers
        if first:
            told[0]["seed"] = first[0]["seed"]  # the script may have seeded anew since
        line.answers = told
    elif problem is not None:
        raise UsageError(f"pl.shard: {problem}")
    return line.answers or [aside]
