"""PowerSGD: a matrix is sent as two low-rank factors, whose product approximates it.

For each matrix M (n x m), with the residual of the last step added:

    P = M Q              averaged over the workers, then made orthonormal
    Q = M' P             averaged; also the start of the next step
    the mean is P Q', and M - P Q' is the residual of this worker

Rank r sends r (n + m) numbers instead of n m. Tensors with one dimension, and matrices that would
not become `rate` (2) times smaller, are sent uncompressed.

Vogels et al. 2019, arXiv 1905.13727.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress.codec import Codec, CodecContext, Layout, Span
from paceline.compress.kernels import Draw
from paceline.compress.reduction import CompressedReduction
from paceline.runtime.work import Work


class PowerSGD(Codec):
    """Low-rank factors of matrices."""

    @property
    def rank(self) -> int:
        """The number of columns of the factors."""
        return int(self.spec.value)

    def reduction(self, context: CodecContext) -> CompressedReduction:
        return PowerSGDReduction(self, context)

    def shape(self, size: torch.Size) -> tuple[int, int] | None:
        """Return the matrix shape of a tensor; None if it is sent uncompressed."""
        if len(size) < 2:
            return None
        n, m = size[0], size.numel() // size[0]
        rate = self.spec.option("rate")
        return (n, m) if (n + m) * self.rank * rate < n * m else None


def _only_matrices(codec: PowerSGD, layout: Layout) -> Layout:
    """Return the layout in which only sufficiently large matrices are compressed."""
    shaped = tuple(pair for pair in layout.matrices if codec.shape(pair[1]) is not None)
    others = tuple(span for span, size in layout.matrices if codec.shape(size) is None)
    spans = tuple(span for span, _ in shaped)
    return Layout(layout.size, layout.first, spans, layout.small + others, shaped)


class _LowRankMatrix:
    """One matrix: its span in the flat tensor, its shape, and the rank of its factors."""

    def __init__(self, span: Span, shape: tuple[int, int], rank: int) -> None:
        self.span, self.shape, self.rank = span, shape, min(rank, *shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return self.span.of(flat).view(self.shape)


class PowerSGDReduction(CompressedReduction):
    """A reduction that averages the left factors, then the right factors."""

    codec: PowerSGD

    def __init__(self, codec: PowerSGD, context: CodecContext) -> None:
        layout = _only_matrices(codec, context.layout)
        super().__init__(
            codec, CodecContext(layout, context.allocate, context.rank, context.is_elastic)
        )
        self.matrices: list[_LowRankMatrix] = []
        for span, size in layout.matrices:
            shape = codec.shape(size)
            assert shape is not None
            self.matrices.append(_LowRankMatrix(span, shape, codec.rank))
        self._lefts, self._left_memory = self._allocate_factors(0)
        self._rights, self._right_memory = self._allocate_factors(1)
        self._left_mean, self._right_mean = self._allocate_factors(0), self._allocate_factors(1)
        # The same on all workers, because the seed of each matrix is the same.
        for matrix, right in zip(self.matrices, self._rights, strict=True):
            generator = torch.Generator().manual_seed(codec.seed + layout.first + matrix.span.start)
            right.copy_(torch.randn(right.shape, generator=generator))
        self.begin = [right.clone() for right in self._rights]  # of the next step
        # Residual and gradients; the residual itself if there is one.
        self.wanted = torch.zeros(layout.size) if self.residual is None else self.residual
        self._is_broken = False  # some worker's numbers are not finite
        self._num_workers = 1

    def _allocate_factors(self, side: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        memory = self.allocate(sum(self._factor_sizes(side)), torch.float32)
        return self._factors_in(memory, side), memory

    def empty_factors(
        self, side: int, device: torch.device
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return left (0) or right (1) factors on a device, without values, and their memory."""
        memory = torch.empty(sum(self._factor_sizes(side)), device=device)
        return self._factors_in(memory, side), memory

    def move(self, device: torch.device) -> None:
        """Keep the state on a device (powersgd_on_device.py)."""
        self.begin = [right.to(device) for right in self.begin]
        self.wanted = self.wanted.to(device)
        if self.residual is not None:
            self.residual = self.wanted

    def account_step(self, num_workers: int) -> None:
        """Count the bytes of a step that a device has exchanged."""
        self._num_workers = num_workers
        self._count_sent(num_workers)

    def _factor_sizes(self, side: int) -> list[int]:
        return [matrix.shape[side] * matrix.rank for matrix in self.matrices]

    def _factors_in(self, memory: torch.Tensor, side: int) -> list[torch.Tensor]:
        sizes = self._factor_sizes(side)
        parts = memory.split(sizes) if sizes else ()
        pairs = zip(parts, self.matrices, strict=True)
        return [part.view(matrix.shape[side], matrix.rank) for part, matrix in pairs]

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        del draw
        for number, matrix in enumerate(self.matrices):
            wanted = matrix.span.of(self.wanted)
            if self.residual is None:
                wanted.copy_(matrix.span.of(values))
            else:
                wanted.add_(matrix.span.of(values))
            torch.matmul(matrix.view(self.wanted), self.begin[number], out=self._lefts[number])

    def hop(self, group: Group) -> Work[Any]:
        self._num_workers = group.size
        out = self._left_mean[1]
        work = group.all_reduce(self._left_memory, "mean", out=out, async_op=True)
        assert isinstance(work, Work)
        return work

    def second_hop(self, group: Group) -> None:
        # Pass on numbers that are not finite, so that all workers see them; the next step starts
        # without them.
        self._is_broken = not bool(torch.isfinite(self._left_mean[1]).all())
        for number, matrix in enumerate(self.matrices):
            left = self._left_mean[0][number]
            if not self._is_broken:
                left.copy_(torch.linalg.qr(left)[0])
            torch.matmul(matrix.view(self.wanted).t(), left, out=self._rights[number])
        out = self._right_mean[1]
        work = group.all_reduce(self._right_memory, "mean", out=out, async_op=True)
        assert isinstance(work, Work)
        self.last_hop = work

    def write(self, out: torch.Tensor) -> None:
        for number, matrix in enumerate(self.matrices):
            left, right = self._left_mean[0][number], self._right_mean[0][number]
            torch.matmul(left, right.t(), out=matrix.view(out))
            if self._is_broken:
                matrix.span.of(self.wanted).zero_()
                continue
            self.begin[number].copy_(right)
            if self.residual is not None:
                matrix.span.of(self.residual).sub_(matrix.span.of(out))

    def common(self) -> Iterator[torch.Tensor]:
        return iter(self.begin)

    @property
    def sent_bytes(self) -> int:
        factors = self._left_memory.numel() + self._right_memory.numel()
        return 8 * factors * (self._num_workers - 1) // self._num_workers
