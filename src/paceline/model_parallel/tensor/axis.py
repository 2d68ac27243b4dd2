"""The tp axis as layers see it: who we are on it, and the ways in which a tensor crosses it.

Outside of a cut region every process holds the same WHOLE tensors, and their gradients are complete
and the same everywhere. Inside, each process holds a PIECE. Four crossings keep that true:

    enter    whole -> whole, used by pieces     forward nothing       backward all-reduce
    leave    partial sums -> whole              forward all-reduce    backward nothing
    gather   pieces -> whole                    forward all-gather    backward our piece
    piece    whole -> our piece                 (enter, and a slice)

Each counts itself under the name of the module that asked for it, so that tables tell what was
done, not what was thought.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.model_parallel.parts.layout import Slice


class Axis:
    """A process's place on the tp axis, and its process group."""

    def __init__(self, group: dist.ProcessGroup, index: int, count: int) -> None:
        self.group, self.index, self.count = group, index, count
        self.num_forward: Counter[str] = Counter()  # collectives, by module
        self.num_backward: Counter[str] = Counter()

    def __deepcopy__(self, _memo: object) -> Axis:
        return self  # a copy of a model talks over the same group

    def slice(self, dim: int, blocks: int = 1) -> Slice:
        """Return our slice of a dimension."""
        return Slice(dim, self.index, self.count, blocks)

    def enter(self, whole: Tensor, label: str) -> Tensor:
        """Use a whole tensor with pieces. Its gradient must be no other tensor's memory."""
        if torch.is_grad_enabled() and whole.requires_grad:
            entered: Tensor = _Enter.apply(whole, self, label)  # type: ignore[no-untyped-call]
            return entered
        return whole

    def leave(self, partial: Tensor, label: str) -> Tensor:
        """Sum over the axis, in place: the argument must be fresh."""
        summed: Tensor = _Leave.apply(partial, self, label)  # type: ignore[no-untyped-call]
        return summed

    def piece(self, whole: Tensor, dim: int, blocks: int, label: str) -> Tensor:
        """Return our piece of a whole tensor."""
        return self.slice(dim, blocks).of(self.enter(whole, label))

    def gather(self, piece: Tensor, dim: int, blocks: int, label: str) -> Tensor:
        """Put the pieces of all processes together."""
        whole: Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
            piece, self, dim, blocks, label
        )
        return whole

    def sum(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place; without autograd."""
        dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def on_gather(self, origins: frozenset[str], why: str) -> None:
        """Hear that cut tensors are gathered because an operation has no rule."""

    def may_meet(self, one: frozenset[str], other: frozenset[str]) -> bool:
        """Whether results of these columns may be added or multiplied; while tracing, not all."""
        del one, other
        return True

    def on_loss(self, origins: frozenset[str]) -> None:
        """Hear that cut logits have met their loss."""

    def all_pieces(self, piece: Tensor) -> list[Tensor]:
        """Fetch everybody's piece; without autograd."""
        pieces = [torch.empty_like(piece) for _ in range(self.count)]
        dist.all_gather(pieces, piece, group=self.group)
        return pieces


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.axis.num_backward[ctx.label] += 1
        return ctx.axis.sum(grad.contiguous()), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, label: str) -> Tensor:
        axis.num_forward[label] += 1
        if not partial.is_contiguous():
            return axis.sum(partial.contiguous())
        ctx.mark_dirty(partial)
        return axis.sum(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        del ctx
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, axis: Axis, dim: int, blocks: int, label: str) -> Tensor:
        ctx.slice = axis.slice(dim, blocks)
        axis.num_forward[label] += 1
        pieces = axis.all_pieces(piece.contiguous())
        if blocks == 1:
            return torch.cat(pieces, dim)
        chunks = [piece.chunk(blocks, dim) for piece in pieces]
        return torch.cat([chunk[block] for block in range(blocks) for chunk in chunks], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.slice.of(grad), None, None, None, None


class Simulated(Axis):
    """An axis without others: shapes are right, sums and gathered numbers mean nothing."""

    def __init__(self, count: int, index: int = 0) -> None:
        self.index, self.count = index, count
        self.num_forward, self.num_backward = Counter(), Counter()

    def sum(self, tensor: Tensor, op: Any = None) -> Tensor:
        del op
        return tensor

    def all_pieces(self, piece: Tensor) -> list[Tensor]:
        return [piece] * self.count
