"""Codecs that send some of the numbers as they are, and none of the others.

    topk:r      the largest fraction r by size, with their places; workers choose different ones,
                and everybody adds up everybody's
    randomk:r   places that all workers know without a message, so that only values travel, and are
                averaged as any dense tensor

A payload of topk: k values, then their places as gaps from one to the next (sparse_format.py), in
room for the worst case: its size is the same each time. `topk:0.01+int8` encodes the values again.
With `feedback` (the default) what is not chosen waits in the residual and grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress import blocks
from paceline.compress import sparse_format as sparse
from paceline.compress.codec import Codec, Ground
from paceline.compress.journey import Journey
from paceline.compress.kernels import Draw
from paceline.compress.parse import CodecSpec
from paceline.runtime.work import Work


class TopK(Codec):
    """The largest values and where they are."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.share = spec.value
        self._values = blocks.FORMATS[spec.values] if spec.values else None
        self._room: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by number of values

    def count(self, size: int) -> int:
        """Return how many of so many numbers are sent."""
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
        indices, chosen = self._space(k)
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
        """Write the chosen values and their places; what rounding takes off goes back."""
        k = indices.numel()
        split = self._value_bytes(k)
        if self._values is None:
            payload[:split].view(torch.float32).copy_(chosen)
        else:
            blocks.encode(self._values.name, chosen, payload[:split], draw=draw)
            if residual is not None:
                rounded = torch.empty_like(chosen)
                blocks.mean(self._values.name, [payload[:split]], rounded)
                # What others see as no number is all there still, except for what is none.
                left = torch.where(torch.isfinite(rounded), chosen - rounded, chosen)
                residual.index_add_(0, indices, left.nan_to_num_(0.0, 0.0, 0.0))
        sparse.pack_gaps(indices, size, payload[split:], width=sparse.gap_format(size, k))

    def mean(self, payloads: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        k = self.count(out.numel())
        split, width = self._value_bytes(k), sparse.gap_format(out.numel(), k)
        rows = []
        for payload in payloads:
            indices = torch.empty(k, dtype=torch.int32)
            sparse.unpack_gaps(payload[split:], out.numel(), indices, width=width)
            if self._values is None:
                chosen = payload[:split].view(torch.float32)
            else:
                chosen = torch.empty(k)
                blocks.mean(self._values.name, [payload[:split]], chosen)
            rows.append((indices, chosen))
        sparse.scatter_mean(rows, out)

    def _value_bytes(self, k: int) -> int:
        return 4 * k if self._values is None else self._values.payload_bytes(k)

    def _space(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        if k not in self._room:
            self._room[k] = (torch.empty(k, dtype=torch.int32), torch.empty(k))
        return self._room[k]


class RandomK(Codec):
    """Values at places that all know."""

    def count(self, size: int) -> int:
        """Return how many of so many numbers are sent."""
        return max(1, min(size, math.ceil(self.spec.value * size)))

    def journey(self, ground: Ground) -> Journey:
        return _KnownPlaces(self, ground)


class _KnownPlaces(Journey):
    """One flat tensor, of which a part is averaged."""

    codec: RandomK

    def __init__(self, codec: RandomK, ground: Ground) -> None:
        super().__init__(codec, ground)
        counts = [codec.count(span.count) for span in self.layout.large]
        self._places = [torch.empty(count, dtype=torch.int32) for count in counts]
        self._values = ground.allocate(sum(counts), torch.float32)
        self._mean = ground.allocate(sum(counts), torch.float32)
        self._num_workers = 1

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        parts = self._values.split([places.numel() for places in self._places])
        common = Draw(self.codec.seed, draw.step, draw.first)
        for span, places, part in zip(self.layout.large, self._places, parts, strict=True):
            sparse.random_indices(span.count, places.numel(), common.at(span.start), places)
            wanted = span.of(values)
            if self.residual is not None:
                wanted = span.of(self.residual).add_(wanted)
            torch.index_select(wanted, 0, places, out=part)
            if self.residual is not None:
                wanted.index_fill_(0, places.long(), 0.0)
            else:  # the mean over all places is right if those that are sent count for the others
                part.mul_(span.count / places.numel())

    def hop(self, group: Group) -> Work[Any]:
        self._num_workers = group.size
        work = group.all_reduce(self._values, "mean", out=self._mean, async_op=True)
        assert isinstance(work, Work)
        self.last_hop = work
        return work

    def write(self, out: torch.Tensor) -> None:
        parts = self._mean.split([places.numel() for places in self._places])
        for span, places, part in zip(self.layout.large, self._places, parts, strict=True):
            span.of(out).zero_().index_copy_(0, places.long(), part)

    @property
    def sent_bytes(self) -> int:
        return 8 * self._values.numel() * (self._num_workers - 1) // self._num_workers
