"""Gradients weighted by the samples of their batch (runtime/batch_weight.py), and divided by the
scale of the loss.

Each gradient is multiplied as it arrives at its parameter, before it is accumulated: so batches of
different sizes may be accumulated too, and the script, other workers, servers and paces see
unscaled gradients. While all batches have the same weight and no loss is scaled, there are no hooks
and no cost.

THE SCALE. A GradScaler multiplies the loss, so that gradients do not vanish in float16. Here the
product is a node of its own in autograd's graph. Backward reaches it first; it records its scale,
by which the parameters divide. The record is cleared when the pass ends, or by the next forward
pass if it failed. A pass without a scaled loss has scale 1.

Threads: the one that calls backward().
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from paceline.comm.devices import is_on_device
from paceline.data_parallel.direct_gradients import is_going_to_accumulate

_scale: float | torch.Tensor = 1.0  # a tensor if the loss is on a device: no wait for it
_are_scaled = False
_all: weakref.WeakSet[Weighting] = weakref.WeakSet()


class Weighting:
    """Scales the gradients of some parameters."""

    def __init__(self) -> None:
        self.weight = 1.0  # by which the gradients of this pass are multiplied
        self._params: Sequence[torch.nn.Parameter] = ()
        self._hooks: list[RemovableHandle] = []
        self.is_in_loss = False  # see weight_loss_instead
        _all.add(self)

    def cover(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Scale the gradients of these parameters from now on."""
        self._params = params
        self.rehook()

    def set(self, weight: float) -> None:
        """Scale the gradients of the following backward passes."""
        if weight != self.weight:
            self.weight = weight
            self.rehook()

    def weight_loss_instead(self) -> None:
        """Remove the hooks: the loss is multiplied by the weight, because autograd does not
        deliver gradients to these parameters."""
        if not self.is_in_loss:
            self.is_in_loss = True
            self.rehook()

    def close(self) -> None:
        """Remove all hooks."""
        self.cover(())

    def rehook(self) -> None:
        """Register the hooks that are needed now."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        is_needed = self.weight != 1.0 or _are_scaled
        if is_needed and not self.is_in_loss:
            self._hooks = [
                p.register_hook(partial(self._scale, get_gradient_edge(p).node))
                for p in self._params
                if p.requires_grad
            ]

    def _scale(self, accumulate: Any, grad: torch.Tensor) -> torch.Tensor:
        scale = _scale
        if isinstance(scale, torch.Tensor) and scale.device != grad.device:
            scale = float(scale)  # a parameter on the CPU: its gradient has waited, too
        is_scaled = isinstance(scale, torch.Tensor) or scale != 1.0
        if is_scaled and not is_going_to_accumulate(accumulate):
            scale = 1.0  # torch.autograd.grad(scaled loss, ...): the script divides
        if not isinstance(scale, torch.Tensor) and self.weight == scale:
            return grad
        # Zero times infinity is not zero.
        return grad * (self.weight / scale) if self.weight else torch.zeros_like(grad)


def expect_scaled_losses() -> None:
    """Let all distributed models, also later ones, divide by the scale of the loss."""
    global _are_scaled
    if not _are_scaled:
        _are_scaled = True
        for weighting in _all:
            weighting.rehook()


def losses_are_scaled() -> bool:
    """Return whether a pl.GradScaler exists: backward passes may be scaled."""
    return _are_scaled


def scaled(output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply a loss, and let its backward pass record the scale."""
    product: torch.Tensor = _Scaled.apply(output, scale)  # type: ignore[no-untyped-call]
    return product


def forget_scale() -> None:
    """Reset the scale outside of backward, if the last pass failed."""
    global _scale
    if (
        isinstance(_scale, torch.Tensor) or _scale != 1.0
    ) and torch._C._current_graph_task_id() == -1:
        _scale = 1.0


def _begin(scale: float | torch.Tensor) -> None:
    global _scale
    _scale = scale
    Variable._execution_engine.queue_callback(_end)


def _end() -> None:
    global _scale
    _scale = 1.0


class _Scaled(torch.autograd.Function):
    """output * scale."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return output * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scale,) = ctx.saved_tensors
        _begin(scale if is_on_device(scale) else float(scale))
        return grad * scale, None
