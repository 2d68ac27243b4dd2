"""The mean that one process computes of everybody's tensors has the bits of an all-reduce."""

from __future__ import annotations

import pytest
import torch

import paceline as pl
from paceline import _core
from paceline.comm.group import Group
from support import run_ranks
from support.reference import bits

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def noise(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose mean depends on the order of adding them."""
    generator = torch.Generator().manual_seed(rank * 7 + count)
    scale = 10.0 ** torch.randint(-3, 4, (count,), generator=generator).float()
    return (torch.randn(count, generator=generator) * scale).to(dtype)


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(tensors[0])
    code = _core.DTYPES.index(str(out.dtype).removeprefix("torch."))
    _core.reduce_mean([t.data_ptr() for t in tensors], out.data_ptr(), out.numel(), code)
    return out


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_of_an_all_reduce(world_size: int) -> None:
    def body(group: Group) -> None:
        for dtype in DTYPES:
            for count in (1, 63, 4097, 200_003):
                mine = noise(group.rank, count, dtype)
                expected = bits(mean([noise(rank, count, dtype) for rank in range(group.size)]))
                assert bits(group.all_reduce(mine.clone(), "mean")) == expected, (dtype, count)
                shared = pl.empty(count, dtype=dtype).copy_(mine)
                assert bits(group.all_reduce(shared, "mean")) == expected, (dtype, count)

    run_ranks(world_size, body)
