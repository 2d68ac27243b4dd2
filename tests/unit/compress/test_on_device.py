"""Codecs with torch operations: the payloads of the CPU kernels. On a device the tests in
tests/device run them."""

from __future__ import annotations

import pytest
import torch

from paceline.compress import blocks, on_device
from paceline.compress import sparse_format as sparse
from paceline.compress.kernels import Draw


def values_of(count: int, kind: str) -> torch.Tensor:
    torch.manual_seed(count)
    values = torch.randn(count) * torch.logspace(-42, 30, count)
    if kind == "special":
        values[:: max(1, count // 7)] = 0
        values[count // 2] = torch.inf
    if kind == "large":
        values = torch.randn(count).sign() * torch.finfo(torch.float32).max
    return values


@pytest.mark.parametrize("name", on_device.FORMATS)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 2049, 5000])
@pytest.mark.parametrize("kind", ["usual", "special", "large"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_block_formats_have_the_bytes_of_the_kernels(name, count, kind, with_residual):
    form, values = blocks.FORMATS[name], values_of(count, kind)
    right = torch.zeros(form.payload_bytes(count), dtype=torch.uint8)
    left = torch.randn(count) if with_residual else None
    mine = left.clone() if left is not None else None
    blocks.encode(name, values, right, residual=left, draw=Draw(0, 0))
    found = on_device.encode_blocks(form, values, mine)
    torch.testing.assert_close(mine, left, rtol=0, atol=0, equal_nan=True)
    if name == "int8" and kind == "special":  # a step that is NaN has several encodings
        assert torch.equal(found.view(-1, 260)[:, 4:], right.view(-1, 260)[:, 4:])
    else:
        assert torch.equal(found, right)
    read, expected = torch.empty(count), torch.empty(count)
    on_device.decode_blocks(form, found, read)
    blocks.mean(name, [right], expected)
    torch.testing.assert_close(read, expected, rtol=0, atol=0, equal_nan=True)


def test_bf16_keeps_what_is_not_a_number():
    form = blocks.FORMATS["bf16"]
    read = torch.empty(3)
    on_device.decode_blocks(form, on_device.encode_blocks(form, torch.full((3,), torch.nan)), read)
    assert read.isnan().all()


@pytest.mark.parametrize("with_residual", [False, True])
def test_the_selection_is_that_of_the_kernel(with_residual):
    torch.manual_seed(0)
    count, k = 5000, 50
    values, left = torch.randn(count), torch.randn(count)
    values[7], values[11] = torch.nan, -torch.inf
    mine, theirs = (left.clone(), left.clone()) if with_residual else (None, None)
    indices, chosen = torch.empty(k, dtype=torch.int32), torch.empty(k)
    sparse.select(values, k, indices, chosen, residual=theirs)
    found = on_device.select(values, k, mine)
    torch.testing.assert_close(found, (indices, chosen), rtol=0, atol=0, equal_nan=True)
    if with_residual:
        assert torch.equal(mine, theirs)


def test_the_mean_of_rows_is_that_of_the_kernel():
    torch.manual_seed(1)
    rows = []
    for _ in range(3):
        where = torch.randperm(400)[:60].sort().values.to(torch.int32)
        rows.append((where, torch.randn(60)))
    right, found = torch.empty(400), torch.empty(400)
    sparse.scatter_mean(rows, right)
    on_device.scatter_mean(*(torch.stack(part) for part in zip(*rows, strict=True)), found)
    assert torch.equal(found, right)
