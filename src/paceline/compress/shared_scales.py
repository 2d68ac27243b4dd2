"""int8 whose scales all workers share: bytes are added up as they are, on the ring.

First the workers agree on the largest size in each block of 256 values (an all-reduce with MAX of
`block_absmax`), then each counts its numbers in steps of 1/L of it, L = `levels_for(workers)` =
127 / workers, so that sums fit into a byte, and the engine adds up bytes. One byte for each number
in both directions; the more workers, the coarser. A block that holds something not finite anywhere
decodes to NaN everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paceline import _core
from paceline.comm.group import Group
from paceline.compress.codec import Codec, Ground
from paceline.compress.journey import Journey
from paceline.compress.kernels import Draw, in_slices, require, require_residual
from paceline.compress.layout import Span
from paceline.errors import UsageError
from paceline.runtime.work import Work

SHARED_VALUES = 256  # in a block


class SharedScales(Journey):
    """One flat tensor, added up in bytes."""

    def __init__(self, codec: Codec, ground: Ground) -> None:
        super().__init__(codec, ground)
        self._blocks = [num_shared_blocks(span.count) for span in self.layout.large]
        count = sum(span.count for span in self.layout.large)
        self._sizes = ground.allocate(sum(self._blocks), torch.float32)
        self._agreed = ground.allocate(sum(self._blocks), torch.float32)
        self._bytes = ground.allocate(count, torch.int8)
        self._sums = ground.allocate(count, torch.int8)
        self._values: torch.Tensor | None = None  # what is sent, until it is counted
        # The exchange may be repeated from here.
        keeps = ground.is_elastic and self.residual is not None
        self._kept = torch.zeros(self.layout.size) if keeps else None
        self._num_workers = 1

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        del draw
        self._values = values
        if self._kept is not None and self.residual is not None:
            self._kept.copy_(self.residual)
        for span, sizes in zip(self.layout.large, self._sizes.split(self._blocks), strict=True):
            block_absmax(span.of(values), self._left(span), sizes)

    def hop(self, group: Group) -> Work[Any]:
        self._num_workers = group.size
        levels_for(group.size)  # too many of them are refused
        work = group.all_reduce(self._sizes, "max", out=self._agreed, async_op=True)
        assert isinstance(work, Work)
        return work

    def second_hop(self, group: Group) -> None:
        assert self._values is not None
        if self._kept is not None and self.residual is not None:
            self.residual.copy_(self._kept)
        levels = levels_for(self._num_workers)
        for span, sizes, part in self._parts(self._bytes):
            left = self._left(span)
            encode_shared(span.of(self._values), sizes, levels, part, residual=left)
        work = group.all_reduce(self._bytes, "sum", out=self._sums, async_op=True)
        assert isinstance(work, Work)
        self.last_hop = work

    def write(self, out: torch.Tensor) -> None:
        workers = self._num_workers
        levels = levels_for(workers)
        for span, sizes, part in self._parts(self._sums):
            decode_shared(part, sizes, levels, workers, span.of(out))

    @property
    def sent_bytes(self) -> int:
        n = self._num_workers
        return (4 * self._sizes.numel() + self._bytes.numel()) * 2 * (n - 1) // n

    def _left(self, span: Span) -> torch.Tensor | None:
        return None if self.residual is None else span.of(self.residual)

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[Span, torch.Tensor, torch.Tensor]]:
        """Yield each span with the sizes of its blocks, and its part of bytes."""
        sizes = self._agreed.split(self._blocks)
        parts = flat.split([span.count for span in self.layout.large])
        return zip(self.layout.large, sizes, parts, strict=True)


# -- kernels ---------------------------------------------------------------------------------------


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
