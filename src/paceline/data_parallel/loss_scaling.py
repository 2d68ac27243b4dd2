"""The scale of the backward pass under way: how much larger than they are gradients come out.

A GradScaler multiplies the loss, so that gradients do not vanish in float16. Here the product is a
node of its own in autograd's graph. It is the first one that a backward pass comes to, and leaves a
note of its scale; the parameters of distributed models divide by it as their gradients arrive
(weighting.py). The note is taken away when the pass ends, or by the next forward pass if it broke
off. A pass without a scaled loss has scale 1.

Threads: the one that calls backward().
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Variable

_scale = 1.0
_is_in_use = False


def begin_use() -> None:
    """Some GradScaler of ours exists: passes may be scaled from now on."""
    global _is_in_use
    _is_in_use = True


def is_in_use() -> bool:
    """Whether passes may be scaled."""
    return _is_in_use


def scale_of_pass() -> float:
    """Return what the gradients of the backward pass under way are multiplied with."""
    return _scale


def scaled(output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply a loss, so that the backward pass from here on knows of it."""
    product: torch.Tensor = _Scaled.apply(output, scale)  # type: ignore[no-untyped-call]
    return product


def forget() -> None:
    """Outside of backward: no pass is under way, even if the last one broke off."""
    global _scale
    if _scale != 1.0 and torch._C._current_graph_task_id() == -1:
        _scale = 1.0


def _begin(scale: float) -> None:
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
        _begin(float(scale))
        return grad * scale, None
