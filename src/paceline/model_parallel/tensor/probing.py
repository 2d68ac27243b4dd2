"""Probing: a cut region must give what the whole one gave, or it stays whole.

A region is the smallest module around layers that are cut together. It is run with the arguments
that it has when the model runs, before and after the cut: results, gradients of its inputs and of
its parameters are compared. Sums in another order differ in rounding, wrong cuts by the size of
the values themselves; the bounds (of the largest value) lie far from both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model_parallel.tensor.dry_run import quiet
from paceline.model_parallel.tensor.example_input import Run
from paceline.model_parallel.tensor.sharded_tensor import cuts_in, gathered, mapped
from paceline.model_parallel.tensor.styles import Cutting

BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-3}
HALF_BOUND = 5e-2  # of 16-bit numbers


@dataclass
class Call:
    """A call of a region."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Observed:
    """What a region gave: results, gradients of its inputs and of its parameters."""

    outputs: list[Tensor]
    of_inputs: list[Tensor | None]
    of_params: list[tuple[nn.Parameter, Tensor | None]]


def record_calls(regions: Iterable[nn.Module], runs: list[Run]) -> dict[nn.Module, Call]:
    """Run the model; return the first call of each region."""
    calls: dict[nn.Module, Call] = {}

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(module, Call(*mapped((args, kwargs), lambda t: t.detach().clone())))

    hooks = [region.register_forward_pre_hook(record, with_kwargs=True) for region in regions]
    try:
        for module, args in runs:
            with quiet(module), torch.no_grad():
                module(*args)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def observe(region: nn.Module, call: Call) -> Observed:
    """Run a region forward and backward; changes nothing."""
    inputs: list[Tensor] = []

    def fresh(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        if tensor.is_floating_point():
            inputs.append(tensor.requires_grad_())
            # What is written in place must not be a leaf.
            return tensor.view_as(tensor)
        return tensor

    # The same tensor as query, key and value is one input.
    seen: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            seen[id(tensor)] = fresh(tensor)
        return seen[id(tensor)]

    with quiet(region), torch.enable_grad():
        args, kwargs = mapped((call.args, call.kwargs), once)
        output = gathered(tree_of(region(*args, **kwargs)))
        outputs = [t for t in tensors_in(output) if t.is_floating_point()]
        params = [p for p in region.parameters() if p.requires_grad]
        dice = torch.Generator().manual_seed(0)
        terms = [(t * torch.randn(t.shape, generator=dice).to(t)).sum() for t in outputs]
        loss = torch.stack([term.double() for term in terms if term.requires_grad]).sum()
        grads = torch.autograd.grad(loss, [*inputs, *params], allow_unused=True)
    of_params: list[tuple[nn.Parameter, Tensor | None]] = []
    of_params += zip(params, grads[len(inputs) :], strict=True)
    return Observed([t.detach() for t in outputs], list(grads[: len(inputs)]), of_params)


def difference(before: Observed, after: Observed, cutting: Cutting) -> str | None:
    """Say how a cut region differs from the whole one; None if it does not."""
    if len(before.outputs) != len(after.outputs):
        return "it returns another number of tensors when it is cut"
    for whole, cut in zip(before.outputs, after.outputs, strict=True):
        if why := _differs(whole, cut):
            return f"cut, its result differs: {why}"
    for grad, cut_grad in zip(before.of_inputs, after.of_inputs, strict=True):
        if why := _differs(grad, cut_grad):
            return f"cut, the gradient of its input differs: {why}"
    # Some gradients are zero but for rounding (a bias before softmax): they have no size to go by.
    largest = max((float(g.abs().max()) for _, g in before.of_params if g is not None), default=0)
    for (param, grad), (_, cut_grad) in zip(before.of_params, after.of_params, strict=True):
        part = cutting.part_of(param)
        if grad is not None and part is not None:
            grad = part.of(grad)
        if why := _differs(grad, cut_grad, largest / 100):
            return f"cut, the gradient of a parameter differs: {why}"
    return None


def _differs(whole: Tensor | None, cut: Tensor | None, least: float = 1e-6) -> str | None:
    if whole is None or cut is None:
        return None if whole is None and cut is None else "one of them is missing"
    if whole.shape != cut.shape:
        return f"shape {tuple(cut.shape)} in place of {tuple(whole.shape)}"
    if whole.numel() == 0:
        return None
    bound = BOUNDS.get(whole.dtype, HALF_BOUND)
    finite = whole.isfinite()
    if not torch.equal(finite, cut.isfinite()):
        return "values are not finite in other places"
    whole, cut = whole[finite].double(), cut[finite].double()
    if whole.numel() == 0:
        return None
    scale = max(float(whole.abs().max()), least)
    error = float((whole - cut).abs().max()) / scale
    return None if error <= bound else f"by {error:.2g} of the largest value (bound {bound:g})"


def tree_of(output: Any) -> Any:
    """Return the output as nested tuples and dicts (models of other libraries return objects)."""
    plain = isinstance(output, (Tensor, tuple, list, dict)) or output is None
    return output if plain else dict(vars(output))


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree in order."""
    found: list[Tensor] = []
    mapped(tree, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def count_collectives(runs: list[Run]) -> None:
    """Train one step's forward and backward without effect, so that crossings count themselves."""
    for module, args in runs:
        with quiet(module), torch.enable_grad():
            output = tree_of(module(*args))
            terms = [_loss(cut) for cut in cuts_in(output)]
            whole = mapped(output, lambda t: t if type(t) is Tensor else None)
            terms += [t.double().sum() for t in tensors_in(whole) if t.is_floating_point()]
            params = [p for p in module.parameters() if p.requires_grad]
            needed = [term for term in terms if term.requires_grad]
            if needed:
                torch.autograd.grad(torch.stack(needed).sum(), params, allow_unused=True)


def _loss(cut: Any) -> Tensor:
    flat = cut.reshape(-1, cut.shape[-1])
    target = torch.zeros(len(flat), dtype=torch.int64)
    return nn.functional.cross_entropy(flat, target).double()
