"""What a State that comes from elsewhere fills."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.state.protocol import State


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
