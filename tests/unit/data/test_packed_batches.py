"""Batches that are packed and unpacked."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from paceline.data.workers.messages import pack, unpack
from paceline.errors import ProtocolError, UsageError


class Pair(NamedTuple):
    left: Any
    right: Any


def sent(value: Any) -> Any:
    packed = pack(value, "it")
    memory = torch.empty(packed.num_bytes, dtype=torch.uint8)
    packed.write(memory)
    return unpack(packed.plain, memory)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, -(2**63), 2**64 - 1, 1.5, True, "text", b"bytes"],
        {"a": (1, [2, ()]), 3: {}, (4, 5): None},
        Pair(1, Pair("x", [])),
    ],
)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    found = sent(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8],
)
def test_tensors_of_every_kind_arrive(dtype: torch.dtype) -> None:
    whole = (torch.randn(4, 6) * 3).to(dtype)
    for tensor in (whole, whole.t(), whole[1:, ::2], whole[:0], whole[0, 0], whole.expand(2, 4, 6)):
        found = sent([tensor])[0]
        assert found.dtype is dtype and found.shape == tensor.shape
        assert torch.equal(found, tensor)


def test_conjugated_and_learnable_tensors_arrive_as_values() -> None:
    conjugated = torch.randn(3, dtype=torch.complex64).conj()
    assert torch.equal(sent(conjugated), conjugated)
    learnable = torch.nn.Parameter(torch.ones(2))
    assert torch.equal(sent(learnable), learnable) and not sent(learnable).requires_grad


def test_arrays_and_scalars_of_numpy_stay_what_they_are() -> None:
    for thing in (np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), np.array(3.5), np.float32(2.5)):
        found = sent({"it": thing})["it"]
        assert type(found) is type(thing)
        assert found.dtype == thing.dtype and found.shape == thing.shape
        assert np.array_equal(found, thing)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        OrderedDict(a=1),
        2**64,
        np.array(["text"]),
        np.arange(3).astype(">i4"),
        torch.eye(2).to_sparse(),
        [torch.nn.Linear(1, 1)],
    ],
)
def test_types_that_cannot_be_sent_are_named(value: Any) -> None:
    with pytest.raises(UsageError, match="it has a .* in it, which cannot be sent"):
        pack(value, "it")


@pytest.mark.parametrize(
    "plain",
    [
        {"t": ["float32", [4], 0]},
        {"t": ["float32", [1], 1]},
        {"t": ["no_such", [1], 0]},
        {"n": ["os", "system", [1]]},
        {"n": ["no_such", "thing", []]},
        {"a": ["<f4", [9], 0]},
        {"a": ["O", [1], 0]},
        {"what": 1},
        {"u": [], "d": []},
    ],
)
def test_invalid_packed_data_is_refused(plain: Any) -> None:
    with pytest.raises(ProtocolError, match="cannot be unpacked"):
        unpack(plain, torch.zeros(8, dtype=torch.uint8))
