"""Sparse payloads: selected values of a tensor with their indices, in ascending order.

Indices received from another process are checked before anything is written (`BadFrame`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline import _core
from paceline.compress.kernels import Draw, in_slices, require, require_residual, require_threads
from paceline.errors import UsageError

MAX_ELEMENTS = 2**31 - 1  # an index is an int32


def select(
    values: torch.Tensor,
    k: int,
    indices: torch.Tensor,
    chosen: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    draw: Draw | None = None,
    threads: int = 1,
) -> None:
    """Write the k values of largest magnitude to `chosen`, and their indices to `indices`.

    They are selected from v = values + residual; `residual` becomes v with these set to 0. Infinity
    and NaN are larger than all numbers; of equal values the lower index wins. `draw` chooses the
    sample that estimates the threshold: it affects the time, not the result.
    """
    count = values.numel()
    require("values", values, torch.float32)
    _require_selection(count, k)
    require("indices", indices, torch.int32, k)
    require("chosen", chosen, torch.float32, k)
    require_threads(threads)
    _core.select(
        values.data_ptr(),
        require_residual(residual, count),
        count,
        k,
        (draw or Draw(0, 0)).parts,
        threads,
        indices.data_ptr(),
        chosen.data_ptr(),
    )


def scatter_mean(
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor, *, threads: int = 1
) -> None:
    """Write the mean of sparse rows (indices, chosen) to `out`, 0 where no row has an entry.

    Every entry is divided by the number of rows, then added, in the order of the rows.
    """
    require("out", out, torch.float32)
    if not rows:
        raise UsageError("scatter_mean: there are no rows to average")
    found = []
    for number, (indices, chosen) in enumerate(rows):
        require(f"indices of row {number}", indices, torch.int32)
        require(f"values of row {number}", chosen, torch.float32, indices.numel())
        found.append((indices.data_ptr(), chosen.data_ptr(), indices.numel()))
    _core.check_rows(found, out.numel())

    def run(begin: int, end: int) -> None:
        _core.scatter_mean(found, begin, end, out.data_ptr())

    in_slices(out.numel(), 4096, threads, run)


def random_indices(count: int, k: int, draw: Draw, out: torch.Tensor, *, threads: int = 1) -> None:
    """Write k random indices below `count` to `out`, one per stratum; equal draws give equal
    indices."""
    _require_selection(count, k)
    require("out", out, torch.int32, k)

    def run(begin: int, end: int) -> None:
        _core.random_indices(count, k, draw.parts, begin, end, out.data_ptr() + 4 * begin)

    in_slices(k, 1, threads, run)


def gap_bytes(count: int, k: int, width: int) -> int:
    """Return the size of k indices below `count` as gaps of `width` bytes, in the worst case."""
    _require_selection(count, k)
    escape = {1: 255, 2: 65535}.get(width)
    if escape is None:
        raise UsageError(f"gaps must have a width of 1 or 2 bytes, not {width}")
    return width * (k + count // escape + 1)


def gap_format(count: int, k: int) -> int:
    """Return the width of gaps, 1 or 2 bytes, that needs less space for k indices below `count`."""
    return 1 if gap_bytes(count, k, 1) <= gap_bytes(count, k, 2) else 2


def pack_gaps(indices: torch.Tensor, count: int, out: torch.Tensor, *, width: int) -> int:
    """Write ascending indices below `count` as gaps; return the number of bytes used.

    `out` has `gap_bytes()` bytes; unused bytes get a value that the reader skips.
    """
    k = indices.numel()
    require("indices", indices, torch.int32)
    require("out", out, torch.uint8, gap_bytes(count, k, width))
    return _core.pack_gaps(indices.data_ptr(), k, count, width, out.data_ptr())


def unpack_gaps(packed: torch.Tensor, count: int, indices: torch.Tensor, *, width: int) -> None:
    """Read as many indices as `indices` holds; raise BadFrame if `packed` has anything else."""
    k = indices.numel()
    require("indices", indices, torch.int32)
    require("packed", packed, torch.uint8, gap_bytes(count, k, width))
    _core.unpack_gaps(packed.data_ptr(), packed.numel(), k, count, width, indices.data_ptr())


def _require_selection(count: int, k: int) -> None:
    if not 0 <= k <= count <= MAX_ELEMENTS:
        raise UsageError(
            f"cannot select {k} of {count} elements: expected 0 <= k <= elements <= {MAX_ELEMENTS}"
        )
