"""Clip gradients of which each process has a part: the norm is that of the whole model.

torch.nn.utils.clip_grad_norm_ would take the norm of what is here; for parameters of a model on a
mesh it is therefore taught to ask all processes of the unit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.errors import UsageError
from paceline.model_parallel.parts.layout import Holding
from paceline.model_parallel.registry import meshed


def clip(
    group: Group,
    holding: Holding,
    max_norm: float,
    norm_type: float = 2.0,
    only: Collection[str] | None = None,
    waiting: AbstractContextManager[None] | None = None,
) -> torch.Tensor:
    """Scale gradients so that the norm of all of them together, over the processes of the group,
    is at most `max_norm`; return that norm. `only`: of the parameters with these names. `waiting`
    is entered to wait for the others. Collective."""
    if norm_type <= 0:
        raise UsageError(f"clip_grad_norm_(norm_type={norm_type}): expected a number above 0")
    held = [one for name, one in holding if only is None or name in only]
    grads = [one.param.grad for one in held if one.param.grad is not None]
    counted = [one.param.grad for one in held if one.counts and one.param.grad is not None]
    norm = _norm(group, counted, float(norm_type), waiting or nullcontext())
    scale = max_norm / (norm + 1e-6)
    if scale < 1.0 or math.isnan(scale):
        torch._foreach_mul_(grads, scale)
    dtype = grads[0].dtype if grads else torch.float32
    return torch.tensor(norm, dtype=dtype)


def _norm(
    group: Group,
    grads: list[torch.Tensor],
    norm_type: float,
    waiting: AbstractContextManager[None],
) -> float:
    """Return the norm over all processes, summed in float64."""
    norms = [float(one) for one in torch._foreach_norm(grads, norm_type)] if grads else []
    if math.isinf(norm_type):
        told = torch.tensor([max(norms, default=0.0)], dtype=torch.float64)
        with waiting:
            group.all_reduce(told, "max")
        return float(told)
    told = torch.tensor([sum(one**norm_type for one in norms)], dtype=torch.float64)
    with waiting:
        group.all_reduce(told, "sum")
    return float(math.pow(float(told), 1.0 / norm_type))


def teach_torch() -> None:
    """Let torch.nn.utils.clip_grad_norm_ take the norm of the whole model, where it is given
    parameters of a model in parts."""
    theirs = nn.utils.clip_grad.clip_grad_norm_
    if getattr(theirs, "knows_paceline", False):
        return
    nn.utils.clip_grad.clip_grad_norm_ = nn.utils.clip_grad_norm_ = _taught(theirs)


def _taught(theirs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(theirs)
    def clip_grad_norm_(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *rest: Any, **options: Any
    ) -> torch.Tensor:
        is_one = isinstance(parameters, torch.Tensor)
        given = [parameters] if is_one else list(parameters)
        for model, made in meshed.items():
            names = {id(param): name for name, param in model.named_parameters()}
            names.update({id(held.param): name for name, held in made.cut.holding})
            chosen = {names[id(param)] for param in given if id(param) in names}
            if chosen:
                return made.clip(max_norm, norm_type, chosen)
        return theirs(given, max_norm, norm_type, *rest, **options)

    clip_grad_norm_.knows_paceline = True  # type: ignore[attr-defined]
    return clip_grad_norm_
