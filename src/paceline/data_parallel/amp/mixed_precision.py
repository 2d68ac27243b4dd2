"""precision="bf16" and "fp16": the model computes in 16 bits, its parameters stay float32.

The model's `forward` runs under torch.autocast, which gives products 16-bit copies of weights and
inputs and leaves sums, norms and losses in float32. Parameters, gradients and the optimizer's state
stay float32: master weights, without a second copy. What comes out of the model is widened, so that
a script that computes its loss outside gets the float32 numbers that it expects.

A script inside an autocast of its own keeps that. Only `forward` of the instance is replaced;
copies of the model get the plain one back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.data_parallel.amp.cpu_support import ISA, WITHOUT_AMX, Trial, limit_onednn, trial
from paceline.data_parallel.hooks import StandIn, replace_forward
from paceline.errors import UsageError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_problem_with_precision(model: nn.Module, precision: str) -> str | None:
    """Say why a model cannot compute in a precision here; None: it can."""
    if precision == "fp32":
        return None
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype is not torch.float32:
            words = str(param.dtype).removeprefix("torch.")
            return (
                f"precision={precision} keeps parameters in float32 and computes with narrower"
                f" copies, but {name} is {words}: give a float32 model (model.float()), or leave"
                " out precision"
            )
    if threading.current_thread() is not threading.main_thread():
        return None  # beside one that computes a fork is not to be trusted: `compute_in` tries
    tried = trial(_DTYPES[precision])
    return _why_not(precision, tried) if tried.remedy is None else None


def _why_not(precision: str, tried: Trial) -> str:
    return (
        f"precision={precision}: a product of {_DTYPES[precision]} matrices was tried in a child"
        f" process, and {tried.wrong}; this processor or this build of torch cannot do it: use"
        f" precision={'bf16' if precision == 'fp16' else 'fp16'} or fp32"
    )


def compute_in(model: nn.Module, precision: str) -> str:
    """Let a model compute in a precision; return what a person should know about that."""
    if precision == "fp32":
        return ""
    tried, notice = trial(_DTYPES[precision]), ""
    if tried.remedy is None:
        raise UsageError(_why_not(precision, tried))
    if tried.wrong:
        tried.remedy()
        notice = (
            f"precision {precision}: a product was tried in a child process, and {tried.wrong}:"
            f" this machine does not allow instructions that its processor shows. {_said(tried)}"
        )
    replace_forward(model, _AutocastForward(model, _DTYPES[precision]))
    return notice


def _said(tried: Trial) -> str:
    if tried.remedy is limit_onednn:
        return f"oneDNN goes on without AMX ({ISA}={WITHOUT_AMX})"
    return (
        "oneDNN, which has been used here already, is switched off, and products are much slower;"
        f" {ISA}={WITHOUT_AMX} (or AVX2) in the environment keeps it on without them"
    )


def compute_in_full(model: nn.Module) -> None:
    """Give a model its own `forward` back."""
    forward = vars(model).get("forward")
    if isinstance(forward, _AutocastForward):
        del vars(model)["forward"]
        if forward.own is not None:
            vars(model)["forward"] = forward.own


class _AutocastForward(StandIn):
    """Stands in for the `forward` of a model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model = weakref.ref(model)  # weak, so that the model does not hold itself
        self._dtype = dtype
        self._device = next(model.parameters()).device.type
        self.own: Callable[..., Any] | None = vars(model).get("forward")  # if it is no class's

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        model = self._model()
        assert model is not None, "forward of a model that is gone"
        forward = self.own or type(model).forward.__get__(model)
        if torch.is_autocast_enabled(self._device):
            return forward(*inputs, **options)
        with torch.autocast(self._device, dtype=self._dtype):
            output = forward(*inputs, **options)
        if any(self._is_narrow(leaf) for leaf in tree_leaves(output)):
            return tree_map(lambda leaf: leaf.float() if self._is_narrow(leaf) else leaf, output)
        return output

    def _is_narrow(self, thing: Any) -> bool:
        return isinstance(thing, torch.Tensor) and thing.dtype is self._dtype

    def __reduce__(self) -> tuple[Any, ...]:
        if self.own is not None:
            return _same, (self.own,)
        # While a model is rebuilt it has no attributes yet, so this finds its class's forward.
        return getattr, (self._model(), "forward")


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
