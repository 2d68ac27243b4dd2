"""DistributedOptimizer(pace=...): an optimizer at one of Paceline's paces.

`pl.distribute` needs the model. It is called when the script first calls a module that has all of
the optimizer's parameters, just before that module runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.errors import UsageError
from paceline.horovod import session
from paceline.horovod.reductions import Average
from paceline.model_parallel.distribute import distribute


def pace_optimizer(
    optimizer: torch.optim.Optimizer,
    pace: str,
    model: nn.Module | None,
    options: Mapping[str, Any],
    passes: int,
    op: int,
) -> torch.optim.Optimizer:
    """Train at a pace; the optimizer stays the same object and gets Horovod's methods."""
    if op != Average:
        raise UsageError(f"pace={pace!r} averages; op={op!r} cannot be combined with it")
    if passes != 1:
        raise UsageError(
            f"pace={pace!r} with backward_passes_per_step={passes}: use `with model.no_sync():`"
            " around the first backward passes"
        )
    session.current()
    if model is not None:
        distribute(model, optimizer, pace=pace, **options)
    else:
        _DistributeAtFirstCall(optimizer, pace, options)
    for name, method in _METHODS.items():
        setattr(optimizer, name, method)
    return optimizer


def _nothing() -> None:
    """Do nothing: gradients are exchanged in backward."""


def _skip() -> AbstractContextManager[None]:
    return nullcontext()


_METHODS = {"synchronize": _nothing, "skip_synchronize": _skip}


class _DistributeAtFirstCall:
    def __init__(
        self, optimizer: torch.optim.Optimizer, pace: str, options: Mapping[str, Any]
    ) -> None:
        self._optimizer, self._pace, self._options = optimizer, pace, options
        self._hook = register_module_forward_pre_hook(self._see)
        self._guard = optimizer.register_step_pre_hook(self._refuse)

    def _see(self, module: nn.Module, inputs: Any) -> None:
        wanted = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if not wanted <= {id(param) for param in module.parameters()}:
            return
        self._hook.remove()
        self._guard.remove()
        distribute(module, self._optimizer, pace=self._pace, **self._options)
        # torch has collected the hooks of this call already.
        for hook in list(module._forward_pre_hooks.values())[-1:]:
            hook(module, inputs)

    def _refuse(self, *_: Any) -> None:
        raise UsageError(
            f"DistributedOptimizer(pace={self._pace!r}): no module with all of the optimizer's"
            " parameters has been called yet; pass it as model=..."
        )
