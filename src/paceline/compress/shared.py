"""int8 with shared steps: bytes of several workers that can be added.

All workers agree on the largest size that anybody has in a block of 256 values (an all-reduce of
`block_absmax` with MAX), and quantise with it. With `levels_for(workers)` levels on each side the
sum of all workers' bytes is a byte as well, so a ring may add them on its way. A block that holds
something not finite anywhere decodes to NaN everywhere.
"""

from __future__ import annotations

import torch

from paceline import _core
from paceline.compress.slices import in_slices, require, require_residual
from paceline.errors import UsageError

SHARED_VALUES = 256  # in a block


def num_shared_blocks(count: int) -> int:
    """Return how many blocks so many values take."""
    return -(-count // SHARED_VALUES)


def levels_for(workers: int) -> int:
    """Return the levels on each side of zero with which the sum of all workers fits a byte."""
    if not 1 <= workers <= 127:
        raise UsageError(f"int8 with shared steps is for 1 to 127 workers, not {workers}")
    return 127 // workers


def block_absmax(
    values: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    *,
    threads: int = 1,
) -> None:
    """Write the largest size of values + residual in each block to `out`; NaN if not finite."""
    count = values.numel()
    require("values", values, torch.float32)
    require("out", out, torch.float32, num_shared_blocks(count))
    left = require_residual(residual, count)

    def run(begin: int, end: int) -> None:
        _core.block_largest(
            values.data_ptr() + 4 * begin,
            left and left + 4 * begin,
            end - begin,
            out.data_ptr() + 4 * (begin // SHARED_VALUES),
        )

    in_slices(count, SHARED_VALUES, threads, run)


def encode_shared(
    values: torch.Tensor,
    absmax: torch.Tensor,
    levels: int,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    threads: int = 1,
) -> None:
    """Write v / absmax * levels to `out` (int8), v = values + residual, which keeps the rest."""
    count = values.numel()
    require("values", values, torch.float32)
    require("out", out, torch.int8, count)
    require("absmax", absmax, torch.float32, num_shared_blocks(count))
    _require_levels(levels)
    left = require_residual(residual, count)

    def run(begin: int, end: int) -> None:
        _core.encode_shared(
            values.data_ptr() + 4 * begin,
            left and left + 4 * begin,
            end - begin,
            absmax.data_ptr() + 4 * (begin // SHARED_VALUES),
            levels,
            out.data_ptr() + begin,
        )

    in_slices(count, SHARED_VALUES, threads, run)


def decode_shared(
    total: torch.Tensor,
    absmax: torch.Tensor,
    levels: int,
    workers: int,
    out: torch.Tensor,
    *,
    threads: int = 1,
) -> None:
    """Let `out` be the workers' mean, from the sum of their bytes."""
    count = out.numel()
    require("out", out, torch.float32)
    require("total", total, torch.int8, count)
    require("absmax", absmax, torch.float32, num_shared_blocks(count))
    _require_levels(levels)
    if workers < 1 or workers * levels > 127:
        raise UsageError(
            f"the bytes of {workers} workers with {levels} levels do not add up to a byte"
        )

    def run(begin: int, end: int) -> None:
        _core.decode_shared(
            total.data_ptr() + begin,
            end - begin,
            absmax.data_ptr() + 4 * (begin // SHARED_VALUES),
            levels,
            workers,
            out.data_ptr() + 4 * begin,
        )

    in_slices(count, SHARED_VALUES, threads, run)


def _require_levels(levels: int) -> None:
    if not 1 <= levels <= 127:
        raise UsageError(f"levels: expected 1 to 127, got {levels}")
