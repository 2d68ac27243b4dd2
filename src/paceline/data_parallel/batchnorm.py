"""Batch normalisation with the statistics of the global batch.

A plain BatchNorm normalises with the mean and variance of the batch that its own worker sees. Here
the workers put theirs together (see global_statistics.py), so that w workers compute what one
process would with all samples.

Only `forward` of each module is replaced, in the instance: object, class, parameters, buffers and
state_dict stay. Copies (deepcopy, pickle) get their class's forward back, so that a copy that one
rank evaluates or trains alone never waits for the others. In eval mode nothing is communicated.

The collectives are blocking and happen inside forward and backward: give them a Group of their own,
or they queue behind the gradients that are on their way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from paceline.collectives.group import Group
from paceline.data_parallel.global_statistics import Normalize, global_statistics
from paceline.data_parallel.plain import StandIn, replace_forward
from paceline.errors import UsageError


def use_global_statistics(model: nn.Module, group: Group) -> int:
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
    """Give every BatchNorm its own `forward` back."""
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
    # An instance has a forward of its own after this function, and a copy of it its class's.
    here = vars(module).get("forward", type(module).forward)
    is_plain = getattr(here, "__func__", here) is _BatchNorm.forward
    if type(module).forward is not _BatchNorm.forward or not (
        is_plain or isinstance(here, _GlobalForward)
    ):
        return "which has a forward of its own; keep its statistics local or use nn.BatchNorm"
    return ""


class _GlobalForward(StandIn):
    """Stands in for the `forward` of one module."""

    def __init__(self, module: _BatchNorm, group: Group) -> None:
        # Weak, so that the module does not hold itself and goes away like any other.
        self._module = weakref.ref(module)
        self._group = group
        # torch.compile must not look inside: it cannot trace a collective of the engine. Told only
        # here, because it imports the compiler (as every optimizer does when it is made).
        self._train: Callable[..., Tensor] = torch.compiler.disable(_train)

    def __call__(self, input: Tensor) -> Tensor:
        module = self._module()
        assert module is not None, "forward of a module that is gone"
        if not module.training or self._group.size == 1:
            return _BatchNorm.forward(module, input)
        return self._train(module, input, self._group)

    def __reduce__(self) -> tuple[Any, ...]:
        # While a module is rebuilt it has no attributes yet, so this finds its class's forward.
        return getattr, (self._module(), "forward")


def _train(module: _BatchNorm, x: Tensor, group: Group) -> Tensor:
    """Do what _BatchNorm.forward does in training mode, with the global batch's statistics."""
    module._check_input_dim(x)
    tracked = module.num_batches_tracked if module.track_running_stats else None
    if tracked is not None:
        tracked.add_(1)
    with torch.no_grad():
        batch = global_statistics(x, group)
        if batch.num_values == 1:
            raise UsageError(
                f"{type(module).__name__}: the global batch has 1 value per channel, training"
                f" needs more (here: {list(x.shape)}, in a group of {group.size} ranks)"
            )
        if module.track_running_stats and batch.num_values:
            factor = module.momentum
            if factor is None:  # cumulative average
                factor = 1.0 / float(tracked) if tracked is not None else 0.0
            unbiased = batch.var * (batch.num_values / (batch.num_values - 1))
            _move(module.running_mean, batch.mean, factor)
            _move(module.running_var, unbiased, factor)
    arguments = (x, module.weight, module.bias, batch, module.eps, group)
    output: Tensor = Normalize.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


def _move(running: Tensor | None, value: Tensor, factor: float) -> None:
    if running is None:
        return
    # In double and rounded once: the same bits on every rank that started with the same.
    running.copy_(running.double() * (1.0 - factor) + value.double() * factor)
