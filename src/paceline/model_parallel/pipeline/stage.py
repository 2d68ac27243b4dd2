"""Stage: one part of a model, computed for one microbatch at a time.

A stage is an nn.Module (what splitting.py makes) whose forward takes tensors and returns a tuple of
tensors: for the stage behind it, or on the last one the model's outputs, which `unflatten` puts
back into the user's structure; every stage has it. Tensors of any dtype cross from stage to stage,
with and without gradients.

Each stage has autograd graphs of its own, which begin at its inputs. What a microbatch's forward
leaves for its backward is kept here until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.pipeline.backward import Gradients, backward_inputs


@dataclass(frozen=True)
class Crossing:
    """A tensor on its way from a stage to the next."""

    tensor: Tensor  # without a graph
    needs_grad: bool


@dataclass
class _Kept:
    """What the backward of a microbatch needs."""

    inputs: list[Tensor]  # that need a gradient: where the graph begins
    outputs: list[Tensor]  # that have one: where it ends


class _Enter(torch.autograd.Function):
    """Let a graph begin: the gradient of the data is that of the anchor.

    As a leaf, what a stage is given could not be changed in place, as by nn.ReLU(inplace=True).
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor) -> Tensor:  # noqa: ARG004
        ctx.mark_dirty(data)
        return data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class Stage:
    """Computes one stage; keeps what backward needs, by microbatch."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module, self.index = module, index
        self._kept: dict[int, _Kept] = {}
        self._weights_left: dict[int, Callable[[], None]] = {}

    def clear(self) -> None:
        """Forget all microbatches."""
        self._kept.clear()
        self._weights_left.clear()

    def forward(self, microbatch: int, inputs: Sequence[Crossing]) -> tuple[Tensor, ...]:
        """Compute the stage's outputs, with their graph if gradients are on."""
        is_training = torch.is_grad_enabled()
        anchors, entered = [], []
        for crossing in inputs:
            tensor = crossing.tensor
            if is_training and crossing.needs_grad:
                anchor = tensor.new_empty(()).expand(tensor.shape).requires_grad_()
                anchors.append(anchor)
                tensor = _Enter.apply(anchor, tensor)  # type: ignore[no-untyped-call]
            entered.append(tensor)
        outputs = self.module(*entered)
        if not isinstance(outputs, tuple) or not all(isinstance(o, Tensor) for o in outputs):
            kinds = [type(o).__name__ for o in outputs] if isinstance(outputs, tuple) else outputs
            raise UsageError(f"stage {self.index} returned {kinds}, not a tuple of tensors")
        if is_training:
            self._kept[microbatch] = _Kept(anchors, [o for o in outputs if o.requires_grad])
        return outputs

    def end_in(self, microbatch: int, loss: Tensor) -> None:
        """Let the graph of a microbatch end in its loss instead of the outputs."""
        self._kept[microbatch].outputs = [loss]

    def outputs_of(self, microbatch: int) -> list[Tensor]:
        """Return the outputs of a microbatch that need a gradient."""
        return self._kept[microbatch].outputs

    def backward(self, microbatch: int, grads: Gradients) -> list[Tensor | None]:
        """Add up the weights' gradients; return those of the inputs that need one."""
        kept, rooted = self._rooted(microbatch, grads)
        if rooted:
            torch.autograd.backward([o for o, _ in rooted], [g for _, g in rooted])
        return [anchor.grad for anchor in kept.inputs]

    def backward_input(self, microbatch: int, grads: Gradients) -> list[Tensor | None]:
        """Return the gradients of the inputs; those of the weights are left for later."""
        kept, rooted = self._rooted(microbatch, grads)
        outputs, arriving = [o for o, _ in rooted], [g for _, g in rooted]
        if not kept.inputs:  # nobody waits for anything
            self._weights_left[microbatch] = lambda: (
                torch.autograd.backward(outputs, arriving) if outputs else None
            )
            return []
        found, self._weights_left[microbatch] = backward_inputs(outputs, arriving, kept.inputs)
        return list(found)

    def has_weights_left(self, microbatch: int) -> bool:
        """Whether backward_input was done, and backward_weight not yet."""
        return microbatch in self._weights_left

    def backward_weight(self, microbatch: int) -> None:
        """Add up the weights' gradients that backward_input left."""
        self._weights_left.pop(microbatch)()

    def _rooted(
        self, microbatch: int, grads: Gradients
    ) -> tuple[_Kept, list[tuple[Tensor, Tensor]]]:
        kept = self._kept.pop(microbatch)
        pairs = zip(kept.outputs, grads, strict=True)
        return kept, [(output, grad) for output, grad in pairs if grad is not None]
