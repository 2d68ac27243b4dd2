"""State as JSON and named tensors, and back."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from paceline.errors import UsageError
from paceline.state.serializer import state_from_json, state_to_json

LEAVES = (
    some.none()
    | some.booleans()
    | some.integers(-(2**63), 2**63 - 1)
    | some.floats(allow_nan=False)
    | some.text()
    | some.binary()
)
KEYS = some.text() | some.integers(0, 100)
VALUES = some.recursive(
    LEAVES,
    lambda inner: (
        some.lists(inner) | some.tuples(inner, inner) | some.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def through_json(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    written = msgspec.json.decode(msgspec.json.encode(state_to_json(value, "thing", tensors)))
    return state_from_json(written, tensors)


@given(VALUES)
def test_it_comes_back_as_it_was(value: Any) -> None:
    found = through_json(value)
    assert found == value and type(found) is type(value)


def test_numbers_that_json_has_not() -> None:
    assert math.isnan(through_json(float("nan")))
    assert through_json([float("inf"), -float("inf")]) == [float("inf"), -float("inf")]


def test_tensors_have_names() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": torch.ones(2), "b": [torch.zeros(1), 3]}
    written = state_to_json(value, "object/x", tensors)
    assert sorted(tensors) == ["object/x/0", "object/x/1"]
    found = state_from_json(written, tensors)
    assert torch.equal(found["a"], value["a"]) and found["b"][1] == 3


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(
        UsageError, match="object/x has a complex in its state, which cannot be saved"
    ):
        state_to_json({"a": 1j}, "object/x", {})
