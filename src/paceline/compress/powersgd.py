"""PowerSGD: a matrix is sent as two thin ones, whose product is near it.

For each matrix M (n x m), with what was left out last time added:

    P = M Q              averaged over the workers, then made orthonormal
    Q = M' P             averaged; it is also where the next step begins
    the mean is P Q', and M - P Q' of this worker is left out

Rank r sends r (n + m) numbers instead of n m. What has one dimension, or would not become `rate`
times smaller (2), travels as it is.

Vogels et al. 2019, arXiv 1905.13727.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress.codec import Codec, Ground
from paceline.compress.journey import Journey
from paceline.compress.kernels import Draw
from paceline.compress.layout import Layout, Span
from paceline.runtime.work import Work


class PowerSGD(Codec):
    """Knows the rank."""

    @property
    def rank(self) -> int:
        """How many columns the thin matrices have."""
        return int(self.spec.value)

    def journey(self, ground: Ground) -> Journey:
        return _TwoThinOnes(self, ground)

    def shape(self, size: torch.Size) -> tuple[int, int] | None:
        """Return the matrix that a tensor is seen as; None: it travels as it is."""
        if len(size) < 2:
            return None
        n, m = size[0], size.numel() // size[0]
        rate = self.spec.option("rate")
        return (n, m) if (n + m) * self.rank * rate < n * m else None


def _only_matrices(codec: PowerSGD, layout: Layout) -> Layout:
    """Let what is no matrix, or a small one, travel as it is."""
    shaped = tuple(pair for pair in layout.matrices if codec.shape(pair[1]) is not None)
    others = tuple(span for span, size in layout.matrices if codec.shape(size) is None)
    spans = tuple(span for span, _ in shaped)
    return Layout(layout.size, layout.first, spans, layout.small + others, shaped)


class _Thin:
    """One matrix: its place, and its thin ones in the flat tensors that travel."""

    def __init__(self, span: Span, shape: tuple[int, int], rank: int) -> None:
        self.span, self.shape, self.rank = span, shape, min(rank, *shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return self.span.of(flat).view(self.shape)


class _TwoThinOnes(Journey):
    """One flat tensor."""

    codec: PowerSGD

    def __init__(self, codec: PowerSGD, ground: Ground) -> None:
        layout = _only_matrices(codec, ground.layout)
        super().__init__(codec, Ground(layout, ground.allocate, ground.rank, ground.is_elastic))
        self._thin = []
        for span, size in layout.matrices:
            shape = codec.shape(size)
            assert shape is not None
            self._thin.append(_Thin(span, shape, codec.rank))
        self._lefts, self._left_memory = self._room(0)
        self._rights, self._right_memory = self._room(1)
        self._left_mean, self._right_mean = self._room(0), self._room(1)
        # The same on all workers: it is drawn from the same seed for each matrix.
        for thin, right in zip(self._thin, self._rights, strict=True):
            draws = torch.Generator().manual_seed(codec.seed + layout.first + thin.span.start)
            right.copy_(torch.randn(right.shape, generator=draws))
        self._begin = [right.clone() for right in self._rights]
        self._wanted = torch.zeros(layout.size) if self.residual is None else self.residual
        self._is_broken = False  # some worker's numbers are none
        self._num_workers = 1

    def _room(self, side: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        sizes = [thin.shape[side] * thin.rank for thin in self._thin]
        memory = self.allocate(sum(sizes), torch.float32)
        parts = memory.split(sizes) if sizes else ()
        pairs = zip(parts, self._thin, strict=True)
        return [part.view(thin.shape[side], thin.rank) for part, thin in pairs], memory

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        del draw
        for number, thin in enumerate(self._thin):
            wanted = thin.span.of(self._wanted)
            if self.residual is None:
                wanted.copy_(thin.span.of(values))
            else:
                wanted.add_(thin.span.of(values))
            matrix = thin.view(self._wanted)
            torch.matmul(matrix, self._begin[number], out=self._lefts[number])

    def hop(self, group: Group) -> Work[Any]:
        self._num_workers = group.size
        out = self._left_mean[1]
        work = group.all_reduce(self._left_memory, "mean", out=out, async_op=True)
        assert isinstance(work, Work)
        return work

    def second_hop(self, group: Group) -> None:
        # Nobody shall lose sight of what is no number; the next step is without it.
        self._is_broken = not bool(torch.isfinite(self._left_mean[1]).all())
        for number, thin in enumerate(self._thin):
            left = self._left_mean[0][number]
            if not self._is_broken:
                left.copy_(torch.linalg.qr(left)[0])
            torch.matmul(thin.view(self._wanted).t(), left, out=self._rights[number])
        out = self._right_mean[1]
        work = group.all_reduce(self._right_memory, "mean", out=out, async_op=True)
        assert isinstance(work, Work)
        self.last_hop = work

    def write(self, out: torch.Tensor) -> None:
        for number, thin in enumerate(self._thin):
            left, right = self._left_mean[0][number], self._right_mean[0][number]
            torch.matmul(left, right.t(), out=thin.view(out))
            if self._is_broken:
                thin.span.of(self._wanted).zero_()
                continue
            self._begin[number].copy_(right)
            if self.residual is not None:
                thin.span.of(self.residual).sub_(thin.span.of(out))

    def common(self) -> Iterator[torch.Tensor]:
        return iter(self._begin)

    @property
    def sent_bytes(self) -> int:
        thin = self._left_memory.numel() + self._right_memory.numel()
        return 8 * thin * (self._num_workers - 1) // self._num_workers
