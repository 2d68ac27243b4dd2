"""Clip gradients of a sharded model by the norm of the full model.

torch.nn.utils.clip_grad_norm_ would use the norm of the local shards. For parameters of a model on
a mesh it is therefore replaced by one that asks all processes of the unit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.group import Group
from paceline.errors import UsageError
from paceline.model_parallel.distribute import mesh_models
from paceline.model_parallel.sharding.layout import LocalShards
from paceline.model_parallel.unit import MeshUnit


def clip(
    unit: MeshUnit,
    shards: LocalShards,
    max_norm: float,
    norm_type: float = 2.0,
    only: Collection[str] | None = None,
    waiting: AbstractContextManager[None] | None = None,
) -> torch.Tensor:
    """Scale gradients so that their norm over all processes of the unit is at most `max_norm`;
    return the norm before. `only`: the names of the parameters to clip. `waiting` is entered while
    this process waits for other processes. Does not wait for a device. Collective."""
    if norm_type <= 0:
        raise UsageError(f"clip_grad_norm_(norm_type={norm_type}): expected a number above 0")
    local = [one for name, one in shards.items() if only is None or name in only]
    grads = [one.tensor.grad for one in local if one.tensor.grad is not None]
    counted = [one.tensor.grad for one in local if one.is_counted and one.tensor.grad is not None]
    dtype = grads[0].dtype if grads else torch.float32
    if unit.device.type != "cpu":
        on_device = _norm_on_device(unit, counted, float(norm_type))
        if grads:
            torch._foreach_mul_(grads, (max_norm / (on_device + 1e-6)).clamp(max=1.0).to(dtype))
        return on_device.to(dtype)
    norm = _norm(unit.group, counted, float(norm_type), waiting or nullcontext())
    scale = max_norm / (norm + 1e-6)
    if scale < 1.0 or math.isnan(scale):
        torch._foreach_mul_(grads, scale)
    return torch.tensor(norm, dtype=dtype)


def _norm_on_device(unit: MeshUnit, grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm over all processes, on the device: streams order everything."""
    dtype = _widest(unit.device)
    zero = torch.zeros(1, dtype=dtype, device=unit.device)
    norms = torch._foreach_norm(grads, norm_type) if grads else []
    together = torch.cat([zero, *(one.reshape(1).to(dtype) for one in norms)])
    if math.isinf(norm_type):
        return unit.all_reduce_on_device(together.max(), dist.ReduceOp.MAX)
    total = unit.all_reduce_on_device(together.pow(norm_type).sum(), dist.ReduceOp.SUM)
    return total.pow(1.0 / norm_type)


@functools.cache
def _widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that has none."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def _norm(
    group: Group,
    grads: list[torch.Tensor],
    norm_type: float,
    waiting: AbstractContextManager[None],
) -> float:
    """Return the norm over all processes, summed in float64."""
    norms = [float(one) for one in torch._foreach_norm(grads, norm_type)] if grads else []
    if math.isinf(norm_type):
        largest = torch.tensor([max(norms, default=0.0)], dtype=torch.float64)
        with waiting:
            group.all_reduce(largest, "max")
        return float(largest)
    total = torch.tensor([sum(one**norm_type for one in norms)], dtype=torch.float64)
    with waiting:
        group.all_reduce(total, "sum")
    return float(math.pow(float(total), 1.0 / norm_type))


def patch_clip_grad_norm() -> None:
    """Let torch.nn.utils.clip_grad_norm_ use the norm of the full model for the parameters of a
    model on a mesh."""
    original = nn.utils.clip_grad.clip_grad_norm_
    if getattr(original, "knows_paceline", False):
        return
    nn.utils.clip_grad.clip_grad_norm_ = nn.utils.clip_grad_norm_ = _patched(original)


def _patched(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *rest: Any, **options: Any
    ) -> torch.Tensor:
        is_one = isinstance(parameters, torch.Tensor)
        given = [parameters] if is_one else list(parameters)
        for model, mesh_model in mesh_models.items():
            names = {id(param): name for name, param in model.named_parameters()}
            names.update({id(one.tensor): n for n, one in mesh_model.shard.shards.items()})
            chosen = {names[id(param)] for param in given if id(param) in names}
            if chosen:
                return mesh_model.clip(max_norm, norm_type, chosen)
        return original(given, max_norm, norm_type, *rest, **options)

    clip_grad_norm_.knows_paceline = True  # type: ignore[attr-defined]
    return clip_grad_norm_
