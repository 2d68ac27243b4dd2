"""Codecs that send a selection of the numbers.

    topk:r      the fraction r of largest magnitude, with their indices. Workers select different
                numbers, and each worker averages the payloads of all workers
    randomk:r   random indices that all workers compute without communication. Only the values are
                sent, and they are averaged like a dense tensor

A payload of topk has k values, then their indices as gaps (sparse_format.py), with space for the
worst case, so its size is constant. `topk:0.01+int8` also encodes the values. With `feedback` (the
default) the numbers that were not selected accumulate in the residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress import blocks
from paceline.compress import sparse_format as sparse
from paceline.compress.codec import Codec, CodecContext
from paceline.compress.kernels import Draw
from paceline.compress.reduction import CompressedReduction
from paceline.compress.registry import CodecSpec
from paceline.runtime.work import Work


class TopK(Codec):
    """The largest values and their indices."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.share = spec.value
        self._values = blocks.FORMATS[spec.values] if spec.values else None
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by number of values

    def count(self, size: int) -> int:
        """Return how many of this many numbers are sent."""
        return max(1, min(size, math.ceil(self.share * size)))

    def num_bytes(self, count: int) -> int:
        k = self.count(count)
        return self._value_bytes(k) + sparse.gap_bytes(count, k, sparse.gap_format(count, k))

    def encode(
        self,
        values: torch.Tensor,
        payload: torch.Tensor,
        residual: torch.Tensor | None,
        draw: Draw,
    ) -> None:
        size, k = values.numel(), self.count(values.numel())
        indices, chosen = self._buffers_for(k)
        sparse.select(values, k, indices, chosen, residual=residual, draw=draw)
        self.pack(payload, size, indices, chosen, residual, draw)

    def pack(
        self,
        payload: torch.Tensor,
        size: int,
        indices: torch.Tensor,
        chosen: torch.Tensor,
        residual: torch.Tensor | None,
        draw: Draw,
    ) -> None:
        """Write the chosen values and their indices; add the rounding error to the residual."""
        k = indices.numel()
        split = self._value_bytes(k)
        if self._values is None:
            payload[:split].view(torch.float32).copy_(chosen)
        else:
            blocks.encode(self._values.name, chosen, payload[:split], draw=draw)
            if residual is not None:
                rounded = torch.empty_like(chosen)
                blocks.mean(self._values.name, [payload[:split]], rounded)
                # Where receivers get NaN, the residual keeps the value, unless it is not finite.
                left = torch.where(torch.isfinite(rounded), chosen - rounded, chosen)
                residual.index_add_(0, indices, left.nan_to_num_(0.0, 0.0, 0.0))
        sparse.pack_gaps(indices, size, payload[split:], width=sparse.gap_format(size, k))

    def mean(self, payloads: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        k = self.count(out.numel())
        rows = []
        for payload in payloads:
            indices = torch.empty(k, dtype=torch.int32)
            rows.append((indices, self.unpack(payload, out.numel(), indices)))
        sparse.scatter_mean(rows, out)

    def unpack(self, payload: torch.Tensor, size: int, indices: torch.Tensor) -> torch.Tensor:
        """Read the indices of a payload of this many numbers; return the values.

        BadFrame if the payload is no valid one.
        """
        k = indices.numel()
        split = self._value_bytes(k)
        width = sparse.gap_format(size, k)
        sparse.unpack_gaps(payload[split:], size, indices, width=width)
        if self._values is None:
            return payload[:split].view(torch.float32)
        chosen = torch.empty(k)
        blocks.mean(self._values.name, [payload[:split]], chosen)
        return chosen

    @property
    def has_plain_values(self) -> bool:
        """Whether no other codec encodes the selected values."""
        return self._values is None

    def _value_bytes(self, k: int) -> int:
        return 4 * k if self._values is None else self._values.payload_bytes(k)

    def _buffers_for(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        if k not in self._buffers:
            self._buffers[k] = (torch.empty(k, dtype=torch.int32), torch.empty(k))
        return self._buffers[k]


class RandomK(Codec):
    """Values at random indices that all workers compute."""

    def count(self, size: int) -> int:
        """Return how many of this many numbers are sent."""
        return max(1, min(size, math.ceil(self.spec.value * size)))

    def reduction(self, context: CodecContext) -> CompressedReduction:
        return _RandomKReduction(self, context)


class _RandomKReduction(CompressedReduction):
    """A reduction that averages the selected values."""

    codec: RandomK

    def __init__(self, codec: RandomK, context: CodecContext) -> None:
        super().__init__(codec, context)
        counts = [codec.count(span.count) for span in self.layout.large]
        self._indices = [torch.empty(count, dtype=torch.int32) for count in counts]
        self._values = context.allocate(sum(counts), torch.float32)
        self._mean = context.allocate(sum(counts), torch.float32)
        self._num_workers = 1

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        parts = self._values.split([indices.numel() for indices in self._indices])
        common = Draw(self.codec.seed, draw.step, draw.first)
        for span, indices, part in zip(self.layout.large, self._indices, parts, strict=True):
            sparse.random_indices(span.count, indices.numel(), common.at(span.start), indices)
            wanted = span.of(values)
            if self.residual is not None:
                wanted = span.of(self.residual).add_(wanted)
            torch.index_select(wanted, 0, indices, out=part)
            if self.residual is not None:
                wanted.index_fill_(0, indices.long(), 0.0)
            else:  # scale up, so that the expected value is that of the full tensor
                part.mul_(span.count / indices.numel())

    def hop(self, group: Group) -> Work[Any]:
        self._num_workers = group.size
        work = group.all_reduce(self._values, "mean", out=self._mean, async_op=True)
        assert isinstance(work, Work)
        self.last_hop = work
        return work

    def write(self, out: torch.Tensor) -> None:
        parts = self._mean.split([indices.numel() for indices in self._indices])
        for span, indices, part in zip(self.layout.large, self._indices, parts, strict=True):
            span.of(out).zero_().index_copy_(0, indices.long(), part)

    @property
    def sent_bytes(self) -> int:
        return 8 * self._values.numel() * (self._num_workers - 1) // self._num_workers
