"""The tp axis as layers use it: this process's index, and the operations that cross the axis.

Outside of a sharded region every process holds the same FULL tensors, and their gradients are
complete and the same on all processes. Inside, each process holds a SHARD. Four operations lead in
and out:

    enter    full -> full, used with shards     forward nothing       backward all-reduce
    leave    partial sums -> full               forward all-reduce    backward nothing
    gather   shards -> full                     forward all-gather    backward the local shard
    shard    full -> the local shard            (enter, and a slice)

Each counts its collectives under the name of the module that called it, so that tables show what
was done, not what was planned.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.devices import is_on_device
from paceline.model_parallel.sharding.layout import Slice


class Axis:
    """This process's index on the tp axis, and the process groups of the axis.

    `group` exchanges tensors of the model, `host_group` those on the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        index: int,
        count: int,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.index, self.count = index, count
        self._group, self._host_group = group, host_group or group
        self.num_forward: Counter[str] = Counter()  # collectives, by module
        self.num_backward: Counter[str] = Counter()

    def __deepcopy__(self, _memo: object) -> Axis:
        return self  # a copy of a model uses the same group

    def slice(self, dim: int, blocks: int = 1) -> Slice:
        """Return this process's slice of a dimension."""
        return Slice(dim, self.index, self.count, blocks)

    def enter(self, full: Tensor, label: str) -> Tensor:
        """Use a full tensor with shards. Its gradient must not share memory with another's."""
        if torch.is_grad_enabled() and full.requires_grad:
            entered: Tensor = _EnterRegion.apply(full, self, label)  # type: ignore[no-untyped-call]
            return entered
        return full

    def leave(self, partial: Tensor, label: str) -> Tensor:
        """Sum over the axis, in place: no other code may use the argument's memory."""
        summed: Tensor = _LeaveRegion.apply(partial, self, label)  # type: ignore[no-untyped-call]
        return summed

    def shard(self, full: Tensor, dim: int, blocks: int, label: str) -> Tensor:
        """Return the local shard of a full tensor."""
        return self.slice(dim, blocks).of(self.enter(full, label))

    def gather(self, local: Tensor, dim: int, blocks: int, label: str) -> Tensor:
        """Return the full tensor from the shards of all processes."""
        full: Tensor = _GatherShards.apply(  # type: ignore[no-untyped-call]
            local, self, dim, blocks, label
        )
        return full

    def group_of(self, tensor: Tensor) -> dist.ProcessGroup:
        """Return the group that exchanges this tensor."""
        return self._group if is_on_device(tensor) else self._host_group

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place; without autograd."""
        dist.all_reduce(tensor, op, group=self.group_of(tensor))
        return tensor

    def on_gather(self, origins: frozenset[str], why: str) -> None:
        """Note that sharded tensors are gathered because an operation has no rule."""

    def may_combine(self, one: frozenset[str], other: frozenset[str]) -> bool:
        """Return whether results of these columns may be combined; while tracing, not all may."""
        del one, other
        return True

    def on_loss(self, origins: frozenset[str]) -> None:
        """Note that a loss was computed from sharded logits."""

    def all_gather(self, local: Tensor) -> list[Tensor]:
        """Return the shards of all processes; without autograd."""
        locals_ = [torch.empty_like(local) for _ in range(self.count)]
        dist.all_gather(locals_, local, group=self.group_of(local))
        return locals_


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.axis.num_backward[ctx.label] += 1
        return ctx.axis.all_reduce(grad.contiguous()), None, None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, label: str) -> Tensor:
        axis.num_forward[label] += 1
        if not partial.is_contiguous():
            return axis.all_reduce(partial.contiguous())
        ctx.mark_dirty(partial)
        return axis.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        del ctx
        return grad, None, None


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis, dim: int, blocks: int, label: str) -> Tensor:
        ctx.slice = axis.slice(dim, blocks)
        axis.num_forward[label] += 1
        locals_ = axis.all_gather(local.contiguous())
        if blocks == 1:
            return torch.cat(locals_, dim)
        chunks = [local.chunk(blocks, dim) for local in locals_]
        return torch.cat([chunk[block] for block in range(blocks) for chunk in chunks], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.slice.of(grad), None, None, None, None


class SimulatedAxis(Axis):
    """An axis without other processes: shapes are right, reduced and gathered values are not."""

    def __init__(self, count: int, index: int = 0) -> None:
        self.index, self.count = index, count
        self.num_forward, self.num_backward = Counter(), Counter()

    def all_reduce(self, tensor: Tensor, op: Any = None) -> Tensor:
        del op
        return tensor

    def all_gather(self, local: Tensor) -> list[Tensor]:
        return [local] * self.count
