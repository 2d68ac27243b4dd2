"""Memory of one process alone."""

from __future__ import annotations

import gc

import pytest
import torch

from paceline.comm.shared_memory import zeros_in_large_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 1000, 3 << 19])
def test_zeros_in_large_pages(size: int, dtype: torch.dtype) -> None:
    one, other = (zeros_in_large_pages(size, dtype) for _ in range(2))
    assert one.shape == (size,) and one.dtype == dtype and one.is_contiguous()
    assert not one.any() and one.data_ptr() % 64 == 0
    one.fill_(3)
    gc.collect()  # the memory lives as long as the tensor
    assert bool((one == 3).all()) and not other.any()
