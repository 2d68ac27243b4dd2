"""Batch normalisation with the statistics of the global batch.

A plain BatchNorm normalises with the mean and variance of the batch that its own worker sees. Here
the workers combine theirs, so that w workers compute what one process would with all samples.

Only `forward` of each module is replaced, in the instance: object, class, parameters, buffers and
state_dict stay. Copies (deepcopy, pickle) get their class's forward back, so that a copy that one
rank evaluates or trains alone never waits for the others. In eval mode nothing is communicated.

The collectives are blocking and happen inside forward and backward: give them a Group of their own,
or they queue after gradients that are being exchanged.

    forward    every rank gathers (count, mean, M2) of all ranks, where M2 is the sum of squared
               distances from the mean, and merges them (Chan et al.): no difference of large sums
    backward   the input's gradient needs two sums over the global batch, which are all-reduced;
               gradients of weight and bias stay sums over the local batch, like those of any
               other parameter, and the reducer averages them

The reducer scales each worker's parameter gradients by its contribution (see
runtime/batch_weight.py). The sums in backward belong to the scaled gradients of all ranks, so they
are scaled before they are added and scaled back after; a batch whose contribution is 0 counts
neither here nor in forward.

On a device the collectives are those of the device, and the host waits for none of them. So it does
not know the size of the global batch: a batch of one value is not refused there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from paceline.comm.device_group import ByPlace
from paceline.comm.devices import is_on_device
from paceline.comm.group import Group
from paceline.data_parallel.hooks import StandIn, replace_forward
from paceline.errors import UsageError
from paceline.runtime import job

Workers = Group | ByPlace


def use_global_statistics(model: nn.Module, group: Workers) -> int:
    """Make every BatchNorm of the model train with the statistics of the group's global batch.

    Returns how many there are. UsageError, before anything is changed, for one that cannot.
    """
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm)]
    for name, module in found:
        reason = _reason_against(module)
        if reason:
            raise UsageError(
                f"global batch statistics: {name or 'the model'} is a {type(module).__name__},"
                f" {reason}"
            )
    for _, module in found:
        replace_forward(module, _GlobalForward(module, group))
    return len(found)


def use_own_statistics(model: nn.Module) -> None:
    """Restore the own `forward` of every BatchNorm."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _GlobalForward):
            del vars(module)["forward"]


def _reason_against(module: _BatchNorm) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return (
            "which works on GPUs through torch.distributed; use the plain nn.BatchNorm of the same"
            " dimension"
        )
    if isinstance(module, _LazyNormBase):
        return "whose size is not known yet; pass one batch through the model first"
    # After this function an instance has a forward of its own; a copy of it has its class's.
    here = vars(module).get("forward", type(module).forward)
    is_plain = getattr(here, "__func__", here) is _BatchNorm.forward
    if type(module).forward is not _BatchNorm.forward or not (
        is_plain or isinstance(here, _GlobalForward)
    ):
        return "which has a forward of its own; keep its statistics local or use nn.BatchNorm"
    return ""


class _GlobalForward(StandIn):
    """Stands in for the `forward` of one module."""

    def __init__(self, module: _BatchNorm, group: Workers) -> None:
        # Weak, so that the module does not hold itself and is freed like any other.
        self._module = weakref.ref(module)
        self._group = group
        # torch.compile must not look inside: it cannot trace a collective of the engine. Disabled
        # only here, because that imports the compiler (as the first optimizer does).
        self._train: Callable[..., Tensor] = torch.compiler.disable(forward_in_training)

    def __call__(self, input: Tensor) -> Tensor:
        module = self._module()
        assert module is not None, "forward of a module that is gone"
        if not module.training or self._group.size == 1:
            return _BatchNorm.forward(module, input)
        return self._train(module, input, self._group)

    def __reduce__(self) -> tuple[Any, ...]:
        # While a module is rebuilt it has no attributes yet, so this finds its class's forward.
        return getattr, (self._module(), "forward")


def forward_in_training(module: _BatchNorm, x: Tensor, group: Workers) -> Tensor:
    """Do what _BatchNorm.forward does in training mode, with the global batch's statistics."""
    module._check_input_dim(x)
    tracked = module.num_batches_tracked if module.track_running_stats else None
    if tracked is not None:
        tracked.add_(1)
    with torch.no_grad():
        batch = global_statistics(x, group)
        if isinstance(batch.num_values, int) and batch.num_values == 1:
            raise UsageError(
                f"{type(module).__name__}: the global batch has 1 value per channel, training"
                f" needs more (here: {list(x.shape)}, in a group of {group.size} ranks)"
            )
        if module.track_running_stats:
            _track(module, batch, tracked)
    arguments = (x, module.weight, module.bias, batch, module.eps, group)
    output: Tensor = Normalize.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


def _track(module: _BatchNorm, batch: Statistics, tracked: Tensor | None) -> None:
    """Move the running statistics; those of a batch without values do not count."""
    factor: float | Tensor | None = module.momentum
    if factor is None:  # cumulative average
        factor = 0.0 if tracked is None else 1.0 / tracked.double()
    unbiased = batch.var * (batch.num_values / _at_least_one(batch.num_values - 1))
    for running, value in ((module.running_mean, batch.mean), (module.running_var, unbiased)):
        if running is None:
            continue
        # In double and rounded once: the same bits on every rank that started with the same.
        moved = running.double() * (1.0 - factor) + value.double() * factor
        if isinstance(batch.num_values, Tensor):
            running.copy_(torch.where(batch.num_values > 0, moved, running))
        elif batch.num_values:
            running.copy_(moved)


class Statistics(NamedTuple):
    """Of the global batch, for each channel; the variance is the biased one."""

    num_values: int | Tensor  # per channel; a tensor on a device, so that the host need not wait
    mean: Tensor
    var: Tensor


def global_statistics(x: Tensor, group: Workers) -> Statistics:
    """Merge the statistics of all ranks; the result has the same bits everywhere. Collective."""
    x = _widened(x)
    channels = x.shape[1]
    counts_here = channels and job.current().contribution.weight
    count = x.numel() // channels if counts_here else 0
    mine = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    if count:
        mean, var = _mean_and_var(x)
        mine[:1].fill_(count)
        mine[1 : 1 + channels] = mean
        mine[1 + channels :] = var.double() * count
    gathered = torch.empty(group.size, mine.numel(), dtype=torch.float64, device=x.device)
    group.all_gather(mine, out=gathered)
    total, mean, var = merge(gathered)
    return Statistics(total, mean.to(x.dtype), var.to(x.dtype))


def _mean_and_var(x: Tensor) -> tuple[Tensor, Tensor]:
    if is_on_device(x):  # not every device has the operation
        var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        return mean, var
    return torch.batch_norm_update_stats(x, None, None, 0.0)


def _at_least_one(count: int | Tensor) -> int | Tensor:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def merge(gathered: Tensor) -> tuple[int | Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance of all values from rows of (count, means..., M2s...).

    A row's count may be 0.
    """
    counts, of_channels = gathered[:, :1], gathered[:, 1:]
    means, squares = of_channels.chunk(2, dim=1)
    total = counts.sum() if is_on_device(counts) else int(counts.sum())
    divisor = _at_least_one(total)
    mean = _in_rank_order(counts * means) / divisor
    squares = squares + counts * (means - mean) ** 2
    return total, mean, _in_rank_order(squares) / divisor


def _in_rank_order(rows: Tensor) -> Tensor:
    """Add up rows one after the other; sum() would choose an order to suit the processor."""
    return rows.cumsum(0)[-1]


def _widened(x: Tensor) -> Tensor:
    """Half precision is computed in float32, and only the result is rounded."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, where mean and var depend on all ranks' x.

    With y = weight * z + bias, z = (x - mean) / std and N values per channel in the global batch:

        dx = weight / std * (dy - sum(dy) / N - z * sum(dy * z) / N)      sums over the global batch
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        batch: Statistics,
        eps: float,
        group: Workers,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, batch.mean, batch.var)
        ctx.num_values, ctx.eps, ctx.group = batch.num_values, eps, group
        return _affine(x, batch.mean, batch.var, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        sum_dy_z, sum_dy = _local_sums(dy, x, mean, var, ctx.eps)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = None
        if needs_x:
            means = _global_sums(sum_dy_z, sum_dy, ctx.group) / _at_least_one(ctx.num_values)
            dx = _input_gradient(dy, x, weight, mean, var, ctx.eps, means)
        dweight = sum_dy_z.to(weight.dtype) if needs_weight else None
        dbias = sum_dy.to(weight.dtype) if needs_bias else None
        return dx, dweight, dbias, None, None, None


def _affine(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    weight = None if weight is None else weight.to(mean.dtype)
    bias = None if bias is None else bias.to(mean.dtype)
    return F.batch_norm(_widened(x), mean, var, weight, bias, False, 0.0, eps).to(x.dtype)


def _local_sums(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return sum(dy * z) and sum(dy) of this rank: in eval mode the gradients of weight and bias,
    because there mean and variance are constants."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    _, sum_dy_z, sum_dy = torch.ops.aten.native_batch_norm_backward(
        _widened(dy),
        _widened(x),
        torch.ones_like(mean),
        *(mean, var, None, None),
        False,
        eps,
        [False, True, True],
    )
    return sum_dy_z, sum_dy


def _global_sums(sum_dy_z: Tensor, sum_dy: Tensor, group: Workers) -> Tensor:
    """Add up the sums of all ranks by their contributions, in units of this rank's. Collective."""
    contribution = job.current().contribution.weight
    sums = torch.stack([sum_dy_z, sum_dy]).double()
    if not contribution:  # the result will be dropped, but must not be infinite
        sums.zero_()
    group.all_reduce(sums.mul_(contribution))
    return sums / (contribution or 1.0)


def _input_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    means: Tensor,
) -> Tensor:
    """Compute dx in two passes over the memory; `means` are those of dy * z and dy."""
    scale = (var.double() + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.double()
    slope, offset = (-scale * means).to(mean.dtype)
    dx = F.batch_norm(_widened(x), mean, var, slope, offset, False, 0.0, eps)
    per_channel = scale.to(mean.dtype).view(1, -1, *[1] * (x.dim() - 2))
    return dx.addcmul_(_widened(dy), per_channel).to(x.dtype)
