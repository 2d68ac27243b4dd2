"""Tensors and arrays as the engine sees them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline import _core
from paceline.comm.tensors import Buffer, empty_like, num_bytes, result_buffer, split_rows
from paceline.errors import UnsupportedTensor, UsageError


@pytest.mark.parametrize("name", _core.DTYPES)
def test_a_contiguous_tensor_is_used_where_it_lies(name: str) -> None:
    tensor = torch.zeros(3, 4, dtype=getattr(torch, name))
    buffer = Buffer(tensor)
    assert buffer.part == (tensor.data_ptr(), 12)
    assert _core.DTYPES[buffer.dtype] == name and tuple(buffer.shape) == (3, 4)
    if name != "bfloat16":
        array = np.zeros((3, 4), dtype=name)
        assert Buffer(array).part == (array.ctypes.data, 12)
        assert Buffer(array).dtype == buffer.dtype


@pytest.mark.parametrize("cut", [lambda x: x.T, lambda x: x[::2], lambda x: x[:, 1:3]])
def test_a_strided_one_is_copied_and_written_back(cut) -> None:
    for whole in (torch.arange(24.0).view(4, 6), np.arange(24.0).reshape(4, 6)):
        view = cut(whole)
        buffer = Buffer(view)
        assert buffer.count == view.shape[0] * view.shape[1]
        buffer._memory[...] = -1
        assert not (view == -1).any()
        buffer.write_back()
        assert (cut(whole) == -1).all()
        assert int((whole == -1).sum()) == buffer.count  # and nothing else


def test_a_result_needs_memory_that_can_be_written() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert Buffer(array).count == 3
    with pytest.raises(UsageError, match="read-only"):
        result_buffer(array)


@pytest.mark.parametrize("thing", [1, [1.0], None, "text"])
def test_other_things_are_refused(thing) -> None:
    with pytest.raises(UsageError, match=type(thing).__name__):
        Buffer(thing)


def test_dtypes_that_the_engine_does_not_know() -> None:
    with pytest.raises(UnsupportedTensor, match=r"shape \[2\] has dtype torch.complex64"):
        Buffer(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedTensor, match="dtype >i8"):
        Buffer(np.zeros(2, dtype=">i8"))


def test_rows_are_split_as_views() -> None:
    tensor = torch.arange(12).view(6, 2)
    parts = split_rows(tensor, 3)
    parts[1].zero_()
    assert tensor.tolist()[2:4] == [[0, 0], [0, 0]] and [len(part) for part in parts] == [2, 2, 2]
    for wrong in (torch.zeros(5, 2), torch.tensor(1.0)):
        with pytest.raises(UsageError, match="cannot be split into 3 equal parts"):
            split_rows(wrong, 3)


def test_new_memory_is_alike_and_contiguous() -> None:
    made = empty_like(torch.zeros(4, 6, dtype=torch.int16).t())
    assert made.shape == (6, 4) and made.dtype == torch.int16 and made.is_contiguous()
    assert isinstance(empty_like(np.zeros(3)), np.ndarray)
    assert num_bytes((3, 4), torch.float64) == 96 and num_bytes((), torch.int8) == 1
