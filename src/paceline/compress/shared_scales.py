"""int8 whose scales all workers share: bytes are added up as they are, on the ring.

First the workers agree on the largest size in each block (a max of 1/256 of the numbers), then each
counts its numbers in steps of 1/L of it, L = 127 / workers, so that sums fit into a byte, and the
engine adds up bytes. One byte for each number in both directions; the more workers, the coarser.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paceline.collectives.group import Group
from paceline.compress import kernels
from paceline.compress.codec import Codec, Ground
from paceline.compress.draw import Draw
from paceline.compress.journey import Journey
from paceline.compress.layout import Span
from paceline.work import Work


class SharedScales(Journey):
    """One flat tensor, added up in bytes."""

    def __init__(self, codec: Codec, ground: Ground) -> None:
        super().__init__(codec, ground)
        self._blocks = [kernels.num_shared_blocks(span.count) for span in self.layout.large]
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
            kernels.block_absmax(span.of(values), self._left(span), sizes)

    def hop(self, group: Group) -> Work[Any]:
        self._num_workers = group.size
        kernels.levels_for(group.size)  # too many of them are refused
        work = group.all_reduce(self._sizes, "max", out=self._agreed, async_op=True)
        assert isinstance(work, Work)
        return work

    def second_hop(self, group: Group) -> None:
        assert self._values is not None
        if self._kept is not None and self.residual is not None:
            self.residual.copy_(self._kept)
        levels = kernels.levels_for(self._num_workers)
        for span, sizes, part in self._parts(self._bytes):
            left = self._left(span)
            kernels.encode_shared(span.of(self._values), sizes, levels, part, residual=left)
        work = group.all_reduce(self._bytes, "sum", out=self._sums, async_op=True)
        assert isinstance(work, Work)
        self.last_hop = work

    def write(self, out: torch.Tensor) -> None:
        workers = self._num_workers
        levels = kernels.levels_for(workers)
        for span, sizes, part in self._parts(self._sums):
            kernels.decode_shared(part, sizes, levels, workers, span.of(out))

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
