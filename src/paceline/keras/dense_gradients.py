"""Weight gradients of Keras' large dense layers on torch, computed straight into their bucket.

What data_parallel/direct_gradients.py does for nn.Linear, and with the same conditions: Keras
multiplies by a kernel of (inputs, outputs), without torch's layer. Only `call` of the layer is
replaced, in the instance, and only for Dense itself: subclasses may compute anything. Quantized
layers are called another way, and LoRA, mixed precision and symbolic calls get other tensors than
the parameter: then the layer's own `call` runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.data_parallel.bucket import ParamSlot
from paceline.data_parallel.direct_gradients import (
    MIN_ELEMENTS,
    SyncState,
    claim,
    is_ordinary,
)
from paceline.data_parallel.hooks import StandIn
from paceline.data_parallel.reducer import Reducer
from paceline.frameworks.requirement import require


def compute_in_bucket(model: Any, current: Callable[[], Reducer]) -> None:
    """Let the large dense layers of a model compute their kernel's gradient in the bucket.

    `current` returns the reducer, which is another one after a change of pace.
    """
    dense, homes = require("keras").layers.Dense, _Homes(current)
    for layer in model._flatten_layers():
        if type(layer) is dense and "call" not in vars(layer) and layer.built:
            kernel = getattr(layer, "_kernel", None)
            if kernel is not None and kernel.value.numel() >= MIN_ELEMENTS:
                vars(layer)["call"] = _DirectCall(layer, homes)


class _Homes:
    """Finds the place of a parameter's gradient."""

    def __init__(self, current: Callable[[], Reducer]) -> None:
        self._current = current
        self._reducer: Reducer | None = None
        self._num_buckets = 0
        self._slots: dict[torch.nn.Parameter, ParamSlot] = {}

    def find(self, param: Any) -> tuple[ParamSlot | None, Reducer]:
        reducer = self._current()
        if reducer is not self._reducer or len(reducer.buckets) != self._num_buckets:
            self._reducer, self._num_buckets = reducer, len(reducer.buckets)
            self._slots = {slot.param: slot for b in reducer.buckets for slot in b.slots}
        return self._slots.get(param), reducer


class _DirectCall(StandIn):
    """Stands in for the `call` of one layer."""

    def __init__(self, layer: Any, homes: _Homes) -> None:
        self._layer = weakref.ref(layer)  # weak, so that the layer does not hold itself
        self._homes = homes

    def __call__(self, inputs: Any, training: Any = None) -> Any:
        layer = self._layer()
        assert layer is not None, "call of a layer that is gone"
        kernel = layer._kernel.value
        slot, reducer = self._homes.find(kernel)
        if slot is None or layer.lora_enabled or not _is_plain(inputs, kernel):
            return type(layer).call(layer, inputs, training=training)
        output = _Product.apply(inputs, kernel, slot, reducer)  # type: ignore[no-untyped-call]
        if layer.bias is not None:
            output = require("keras").ops.add(output, layer.bias)
        return output if layer.activation is None else layer.activation(output)

    def __reduce__(self) -> tuple[Any, ...]:
        # While a layer is rebuilt it has no attributes yet, so this finds its class's `call`.
        return getattr, (self._layer(), "call")


def _is_plain(inputs: Any, kernel: Any) -> bool:
    return (
        isinstance(inputs, Tensor)
        and inputs.device == kernel.device == torch.device("cpu")
        and is_ordinary(inputs, kernel)
    )


class _Product(torch.autograd.Function):
    """torch.matmul(inputs, kernel), with the gradient of the kernel in given memory."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, kernel: Tensor, slot: ParamSlot, reducer: SyncState
    ) -> Tensor:
        ctx.save_for_backward(inputs, kernel)
        ctx.slot, ctx.reducer = slot, reducer
        return torch.matmul(inputs, kernel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, kernel = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_inputs = grad_kernel = None
        if ctx.needs_input_grad[0]:
            grad_inputs = rows.mm(kernel.t()).view(inputs.shape)
        if ctx.needs_input_grad[1]:
            samples = inputs.reshape(-1, inputs.shape[-1])
            home = claim(ctx.slot, ctx.reducer, ctx.next_functions[1][0])
            if home is None:
                grad_kernel = samples.t().mm(rows)
            else:
                grad_kernel = torch.mm(samples.t(), rows, out=home)
        return grad_inputs, grad_kernel, None, None
