"""A pass that was under way when a checkpoint was made, and how it is continued.

Between two steps all batches that were handed out have counted. So a pass is told by the number of
its next batch, what is left of its data from there on, and what it was a pass over: the FACTS that
the ranks agreed on when it began. Whoever continues it must have the same data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.data.draws import State
from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline.data.passage import Passage

Facts = Mapping[str, Any]

_PASSING = ("epoch", "the epoch of this pass", "resize")  # may be others when it is continued


def state_of(passage: Passage) -> dict[str, Any]:
    """Return a pass that is under way as plain data."""
    return {
        "epoch": passage.epoch,
        "batch": passage.cursor,
        "facts": {k: v for k, v in passage.facts.items() if k not in _PASSING},
        "course": passage.course.place(passage.cursor),
        "order": None if passage.order is None else passage.order.place(),
        "draws": passage.draws,
        "counts": passage.tally.pack(),
    }


@dataclass(frozen=True)
class SavedPassage:
    """A pass as `state_of` told it."""

    state: Mapping[str, Any]
    is_same: bool  # as many workers as then
    is_alone: bool  # the workers were at different batches

    @property
    def epoch(self) -> int:
        epoch: int = self.state["epoch"]
        return epoch

    def require_same_data(self, facts: Facts, epoch: int) -> None:
        """Raise DataError if this is not the data that the pass was over."""
        if epoch != self.epoch:
            raise DataError(
                f"epoch is {epoch}, expected {self.epoch}: the checkpoint was made in the middle of"
                " that one"
            )
        expected: Facts = self.state["facts"]
        for name in expected:
            if (
                name == "batch_size"
                and not self.is_same
                and None not in (expected[name], facts.get(name))
            ):
                continue  # of each worker: with another number of them it may have to be another
            if facts.get(name) != expected[name]:
                raise DataError(
                    f"{name} is {facts.get(name)!r}, expected {expected[name]!r} as in the"
                    f" checkpoint, which was made in the middle of epoch {epoch}; make the loader"
                    " as it was then, or go on from a checkpoint between two epochs"
                )

    def enter(self, passage: Passage) -> None:
        """Put a pass that begins to where it was."""
        state = self.state
        draws: State | None = state["draws"]
        if passage.order is not None and state["order"] is not None:
            passage.order.begin_at(state["order"], is_alone=self.is_alone)
        passage.course.begin_at(state["batch"], state["course"], is_same=self.is_same)
        passage.cursor = state["batch"]
        passage.draws = draws
        passage.tally.load(state["counts"])
