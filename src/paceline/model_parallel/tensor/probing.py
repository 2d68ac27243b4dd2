"""Probing: a sharded region must compute the same as before, or it is not sharded.

A region is the smallest module around layers that are sharded together. It is run with the
arguments that it has when the model runs, before and after it is sharded: results, gradients of its
inputs and of its parameters are compared. Sums in another order differ in rounding, wrong shards by
the size of the values themselves; the bounds (of the largest value) are far from both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model_parallel.dry_run import evaluation_dry_run
from paceline.model_parallel.tensor.example_input import Run
from paceline.model_parallel.tensor.sharded_tensor import (
    gather_tensors,
    map_tensors,
    sharded_in,
    tree_of,
)
from paceline.model_parallel.tensor.styles import ModuleSharder

BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-3}
HALF_BOUND = 5e-2  # of 16-bit numbers


@dataclass
class RegionCall:
    """A call of a region."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Observation:
    """What a region computed: results, gradients of its inputs and of its parameters."""

    outputs: list[Tensor]
    of_inputs: list[Tensor | None]
    of_params: list[tuple[nn.Parameter, Tensor | None]]


def record_calls(regions: Iterable[nn.Module], runs: list[Run]) -> dict[nn.Module, RegionCall]:
    """Run the model; return the first call of each region."""
    calls: dict[nn.Module, RegionCall] = {}

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(
            module, RegionCall(*map_tensors((args, kwargs), lambda t: t.detach().clone()))
        )

    hooks = [region.register_forward_pre_hook(record, with_kwargs=True) for region in regions]
    try:
        for module, args in runs:
            with evaluation_dry_run(module), torch.no_grad():
                module(*args)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def observe(region: nn.Module, call: RegionCall) -> Observation:
    """Run a region forward and backward, without changing it."""
    inputs: list[Tensor] = []

    def fresh(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        if tensor.is_floating_point():
            inputs.append(tensor.requires_grad_())
            # A tensor that is written in place must not be a leaf.
            return tensor.view_as(tensor)
        return tensor

    # The same tensor as query, key and value is one input.
    seen: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            seen[id(tensor)] = fresh(tensor)
        return seen[id(tensor)]

    with evaluation_dry_run(region), torch.enable_grad():
        args, kwargs = map_tensors((call.args, call.kwargs), once)
        output = gather_tensors(tree_of(region(*args, **kwargs)))
        outputs = [t for t in tensors_in(output) if t.is_floating_point()]
        params = [p for p in region.parameters() if p.requires_grad]
        dice = torch.Generator().manual_seed(0)
        terms = [(t * torch.randn(t.shape, generator=dice).to(t)).sum() for t in outputs]
        loss = torch.stack([term.double() for term in terms if term.requires_grad]).sum()
        grads = torch.autograd.grad(loss, [*inputs, *params], allow_unused=True)
    of_params: list[tuple[nn.Parameter, Tensor | None]] = []
    of_params += zip(params, grads[len(inputs) :], strict=True)
    return Observation([t.detach() for t in outputs], list(grads[: len(inputs)]), of_params)


def difference(before: Observation, after: Observation, sharder: ModuleSharder) -> str | None:
    """Return how a sharded region differs from the full one; None if it does not."""
    if len(before.outputs) != len(after.outputs):
        return "sharded, it returns another number of tensors"
    for full, sharded in zip(before.outputs, after.outputs, strict=True):
        if why := _differs(full, sharded):
            return f"sharded, its result differs: {why}"
    for grad, sharded_grad in zip(before.of_inputs, after.of_inputs, strict=True):
        if why := _differs(grad, sharded_grad):
            return f"sharded, the gradient of its input differs: {why}"
    # Some gradients are zero but for rounding (a bias before softmax): they have no scale.
    largest = max((float(g.abs().max()) for _, g in before.of_params if g is not None), default=0)
    for (param, grad), (_, sharded_grad) in zip(before.of_params, after.of_params, strict=True):
        part = sharder.spec_of(param)
        if grad is not None and part is not None:
            grad = part.of(grad)
        if why := _differs(grad, sharded_grad, largest / 100):
            return f"sharded, the gradient of a parameter differs: {why}"
    return None


def _differs(full: Tensor | None, sharded: Tensor | None, least: float = 1e-6) -> str | None:
    if full is None or sharded is None:
        return None if full is None and sharded is None else "one of them is missing"
    if full.shape != sharded.shape:
        return f"shape {tuple(sharded.shape)} instead of {tuple(full.shape)}"
    if full.numel() == 0:
        return None
    bound = BOUNDS.get(full.dtype, HALF_BOUND)
    finite = full.isfinite()
    if not torch.equal(finite, sharded.isfinite()):
        return "other values are not finite"
    full, sharded = full[finite].double(), sharded[finite].double()
    if full.numel() == 0:
        return None
    scale = max(float(full.abs().max()), least)
    error = float((full - sharded).abs().max()) / scale
    return None if error <= bound else f"by {error:.2g} of the largest value (bound {bound:g})"


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree in order."""
    found: list[Tensor] = []
    map_tensors(tree, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def count_collectives(runs: list[Run]) -> None:
    """Run one step's forward and backward without effect, so that the axis counts collectives."""
    for module, args in runs:
        with evaluation_dry_run(module), torch.enable_grad():
            output = tree_of(module(*args))
            terms = [_loss(sharded) for sharded in sharded_in(output)]
            full = map_tensors(output, lambda t: t if type(t) is Tensor else None)
            terms += [t.double().sum() for t in tensors_in(full) if t.is_floating_point()]
            params = [p for p in module.parameters() if p.requires_grad]
            needed = [term for term in terms if term.requires_grad]
            if needed:
                torch.autograd.grad(torch.stack(needed).sum(), params, allow_unused=True)


def _loss(sharded: Any) -> Tensor:
    flat = sharded.reshape(-1, sharded.shape[-1])
    target = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
    return nn.functional.cross_entropy(flat, target).double()
