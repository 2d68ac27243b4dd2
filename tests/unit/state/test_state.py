"""What a State that comes from elsewhere fills."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import PeerLost, UsageError
from paceline.state.protocol import Change, Part, State
from paceline.state.stateful_parts import StatefulParts


def test_tensors_are_filled_by_name_whatever_their_kind() -> None:
    """A file does not say of which kind what a worker had by itself was."""
    mine = State(
        shared={"begin": torch.zeros(2)},
        copied={"basis": torch.zeros(2)},
        own={"residual": torch.zeros(2)},
    )
    mine.fill(State(shared={"begin": torch.ones(2)}, own={"basis": torch.full((2,), 3.0)}))
    assert mine.shared["begin"].tolist() == [1, 1] and mine.copied["basis"].tolist() == [3, 3]
    assert mine.own["residual"].tolist() == [0, 0]


def test_another_shape_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"state 'begin' has the shape \[1\], expected \[2\]"):
        State(shared={"begin": torch.zeros(2)}).fill(State(shared={"begin": torch.ones(1)}))


class Recorder(Part):
    """Notes the changes that it is given; `failing` raises, as a part that lost a peer in it."""

    def __init__(self, *, failing: bool = False) -> None:
        self.seen: list[int] = []
        self._failing = failing

    def resume(self, change: Change) -> None:
        if self._failing:
            raise PeerLost("rank 0: rank 1 is lost", rank=1)
        self.seen.append(change.generation)


def test_a_part_that_loses_a_peer_does_not_hide_the_change_from_later_parts() -> None:
    parts, last = StatefulParts(), Recorder()
    parts.register("common memory", Recorder(failing=True))
    parts.register("data", last)
    change = Change(3, before=(0, 1, 2), after=(0, 1), lost=(), joined=(), uncounted=False)
    with pytest.raises(PeerLost):
        parts.resume(change)
    assert last.seen == [3]
