"""Passages: how far a pass over a loader is, here and on the other workers.

A PASSAGE is one pass over a loader while it is under way. It knows its data by a course (course.py,
reading.py, or the Count below), of which it holds this worker's place: the CURSOR. A newcomer, and
a run that is resumed, come into a passage that others have begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.data.course import Ranks
from paceline.data.draws import State
from paceline.data.saved import Facts
from paceline.data.tally import Tally
from paceline.data.told import KeptOrder


class AnyCourse(Protocol):
    """A Course, a StreamCourse, or a Count."""

    taken: int
    committed: int

    @property
    def reissued(self) -> int:
        """How many samples were handed out a second time."""

    def dropped(self, samples: int) -> int:
        """Return how many samples were left out, at the end of a pass in which so many were not."""

    def stage_of(self, batch: int) -> int:
        """Return the first batch of the stage to which a batch belongs."""

    def commit(self, batches: int) -> None:
        """Note that so many batches have counted."""

    def change(
        self, after: Ranks, *, uncounted: bool, replaced: Mapping[int, int] | None = None
    ) -> None:
        """Go on with other workers."""

    def place(self, batch: int) -> dict[str, Any]:
        """Return what is left from a batch on, for a run that begins there, as plain data."""

    def begin_at(self, batch: int, place: Mapping[str, Any], *, is_same: bool) -> None:
        """Begin there; `is_same`: with as many workers as then."""

    def pack(self) -> dict[str, Any]:
        """Return everything as plain data."""

    def load(self, told: Mapping[str, Any]) -> None:
        """Take over what another worker packed."""


class Count:
    """The course of data that cannot be cut anew: how many batches there were."""

    reissued = 0

    def __init__(self) -> None:
        self.taken = 0
        self.committed = 0
        self.counts: dict[int, list[int]] = {}  # as in StreamCourse

    def dropped(self, samples: int) -> int:  # noqa: ARG002
        """Return 0: whatever there is comes."""
        return 0

    def stage_of(self, batch: int) -> int:  # noqa: ARG002
        """Return 0: there is only one stage."""
        return 0

    def take(self, batch: int, source: int = 0) -> None:  # noqa: ARG002
        """Note that a batch has been given out."""
        self.taken = max(self.taken, batch + 1)

    def use(self, batch: int, source: int = 0) -> None:  # noqa: ARG002
        """The same where workers stay: nothing of it comes again."""
        self.taken = self.committed = batch + 1

    def commit(self, batches: int) -> None:
        """Note that so many batches have counted."""
        self.committed = max(self.committed, batches)
        self.counts = {b: counts for b, counts in self.counts.items() if b >= self.committed}

    def change(
        self, after: Ranks, *, uncounted: bool, replaced: Mapping[int, int] | None = None
    ) -> None:
        """Nothing to do: each worker keeps its own."""

    def place(self, batch: int) -> dict[str, Any]:  # noqa: ARG002
        """Nothing: the number of the batch is all."""
        return {}

    def begin_at(self, batch: int, place: Mapping[str, Any], *, is_same: bool) -> None:  # noqa: ARG002
        """Begin there."""
        self.taken = self.committed = batch

    def pack(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {**vars(self), "counts": list(self.counts.items())}

    def load(self, told: Mapping[str, Any]) -> None:
        """Take over what another worker packed."""
        self.taken, self.committed = told["taken"], told["committed"]
        self.counts = dict(told["counts"])


@dataclass(frozen=True)
class Turn:
    """A change of the workers, as courses hear of it."""

    after: Ranks
    uncounted: bool
    replaced: Mapping[int, int]

    def apply(self, course: AnyCourse, *, counts: bool) -> None:
        """Change a course. What does not `count` in steps (an evaluation) is lost with the worker
        that computed it, so all of that is queued again."""
        if counts:
            course.change(self.after, uncounted=self.uncounted, replaced=self.replaced)
        else:
            course.change(self.after, uncounted=True)


@dataclass
class Passage:
    """One pass over a loader."""

    index: int  # among the passes over this loader
    epoch: int
    counts: bool  # its batches count when a step commits; else (pad=False) at its end
    course: AnyCourse
    order: KeptOrder | None = None
    facts: Facts = field(default_factory=dict)  # what the ranks agreed on about the loader
    cursor: int = 0  # the next batch of this worker
    is_left: bool = False  # by those who are further: nothing of it changes any more
    draws: State | None = None  # of the generators when it began, where it has to be read again
    is_resumed: bool = False  # it was under way when a checkpoint was made
    tally: Tally = field(default_factory=Tally)

    def pack(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "epoch": self.epoch,
            "course": self.course.pack(),
            "order": None if self.order is None else self.order.pack(),
            "tally": self.tally.pack(),
        }

    def take_over(self, told: Mapping[str, Any]) -> None:
        """Continue what another worker packed."""
        if self.order is not None:
            self.order.load(told["order"])
        self.course.load(told["course"])
        self.tally.load(told["tally"])


@dataclass
class ToldPassage:
    """A pass that is open on other workers, and here not yet; and what has changed since."""

    told: dict[str, Any]
    is_replay: bool  # this worker is new: it begins where the others are
    turns: list[Turn] = field(default_factory=list)

    def enter(self, passage: Passage) -> None:
        """Put a passage to where the others are."""
        passage.take_over(self.told)
        course = passage.course
        for turn in self.turns:
            turn.apply(course, counts=passage.counts)
        if self.is_replay:
            # Who takes the place of a lost worker computes its batches of this step again.
            passage.cursor = course.committed if passage.counts else course.taken
