"""Weight gradients of large linear layers, computed straight into their bucket.

The gradient of a linear layer's weight is one matrix product. Autograd would compute it into fresh
memory, from which it is copied into the bucket: for a wide network that copy costs more than the
exchange. Here the product's output is the bucket's own memory, and autograd gets a view of it.

Only on the CPU: for a device the copy is cheap, and a Python call is not.

Nothing else changes: the view passes through hooks and sums like any gradient, and if the final
`param.grad` is not the view itself, it is copied as always. A layer gets a view only if nothing
else can keep it: once per backward pass, in a pass that exchanges gradients, while the weight has
no gradient and no hooks of the script, and never for torch.autograd.grad.

Only `forward` of the layer is replaced, in the instance; copies of it get the plain one back.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from paceline.comm.devices import is_on_device
from paceline.data_parallel.bucket import ParamSlot
from paceline.data_parallel.hooks import StandIn, replace_forward

# Below this a Python call costs as much as the copy.
MIN_ELEMENTS = 1 << 16


class SyncState(Protocol):
    """The reducer, as far as a layer needs it."""

    is_syncing: bool


def compute_in_bucket(
    model: nn.Module, slots: dict[nn.Parameter, ParamSlot], reducer: SyncState
) -> None:
    """Let the large linear layers of the model compute their weight gradients in the bucket."""
    for module in model.modules():
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        weight = module._parameters.get("weight")  # missing if it is computed (weight norm)
        slot = slots.get(weight) if weight is not None else None
        if slot is None or is_on_device(slot.grad):
            continue
        if slot.segment.count >= MIN_ELEMENTS:
            replace_forward(module, _DirectForward(module, slot, reducer))


def compute_as_usual(model: nn.Module) -> None:
    """Restore the layers' own `forward`."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _DirectForward):
            del vars(module)["forward"]


class _DirectForward(StandIn):
    """Stands in for the `forward` of one layer."""

    def __init__(self, module: nn.Linear, slot: ParamSlot, reducer: SyncState) -> None:
        self._module = weakref.ref(module)  # weak, so that the module does not hold itself
        self._slot = slot
        self._reducer = reducer

    def __call__(self, input: Tensor) -> Tensor:
        module = self._module()
        assert module is not None, "forward of a module that is gone"
        weight, bias = module.weight, module.bias
        if weight is not self._slot.param or not is_ordinary(input, weight):
            return F.linear(input, weight, bias)
        output: Tensor = _Linear.apply(input, weight, bias, self._slot, self._reducer)  # type: ignore[no-untyped-call]
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        # While a module is rebuilt it has no attributes yet, so this finds its class's forward.
        return getattr, (self._module(), "forward")


def is_ordinary(input: Tensor, weight: Tensor) -> bool:
    """Return whether this is plain training: no compiler, autocast, vmap or forward mode."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and weight.requires_grad
        and type(input) is Tensor
        and input.dtype == weight.dtype
        and input.dim() >= 2
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


class _Linear(torch.autograd.Function):
    """F.linear with the same products in the same order, one of them into given memory."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        slot: ParamSlot,
        reducer: SyncState,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.slot, ctx.reducer = slot, reducer
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = rows.mm(weight).view(input.shape)
        if ctx.needs_input_grad[1]:
            samples = input.reshape(-1, input.shape[-1])
            home = claim(ctx.slot, ctx.reducer, ctx.next_functions[1][0])
            if home is None:
                grad_weight = rows.t().mm(samples)
            else:
                grad_weight = torch.mm(rows.t(), samples, out=home)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_input, grad_weight, grad_bias, None, None


def claim(slot: ParamSlot, reducer: SyncState, accumulate: Any) -> Tensor | None:
    """Return the bucket's memory for this gradient, if nothing else needs or keeps it."""
    if (
        slot.claimed
        or slot.ready
        or slot.bucket.is_submitted
        or slot.param.grad is not None
        or slot.param._backward_hooks
        or torch.is_grad_enabled()  # the gradient will have a graph of its own
        or not reducer.is_syncing
        or not is_going_to_accumulate(accumulate)
    ):
        return None
    slot.claimed = slot.stale = True  # stale also if this pass fails
    return slot.segment.view(slot.bucket.grads)  # a new object, which autograd can keep


def is_going_to_accumulate(accumulate: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:  # torch.autograd.grad(..., weight): the caller gets the gradient
        return False
