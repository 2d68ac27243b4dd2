"""Measure the layers of a model: time, parameters, what backward keeps, what goes on to the next.

The model is cut at every layer, and the pieces run one after the other on the example: a piece is a
layer with the code that follows it up to the next one, which always runs in the same stage. So what
is measured is what a stage would run. The first piece has what stands before the first layer, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.model_parallel.pipeline.dry_run import undisturbed
from paceline.model_parallel.pipeline.graph import LayerGraph
from paceline.model_parallel.pipeline.program import CannotCut
from paceline.model_parallel.pipeline.splitting import StageModule, make_stages
from paceline.model_parallel.pipeline.tracing import trace


class LayerCost(msgspec.Struct, frozen=True):
    """What one layer costs, for one batch like the example; `to_plain` gives it as plain data."""

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int  # tied ones count where they are first used
    activation_bytes: int  # what is kept for backward, without parameters
    output_bytes: int  # what a cut after it would send
    calls: int = 1  # in one forward pass; times and activations are the sums over them


def measure_layers(model: nn.Module, *example: Any, repeats: int = 3) -> list[LayerCost]:
    """Run every layer forward and backward on the example; the fastest of the repeats counts.

    The model, its buffers and gradients, and the random state are afterwards as before.
    """
    if repeats < 1:
        raise UsageError(f"repeats={repeats}: at least one is needed")
    if any(one.device.type == "meta" for one in [*model.parameters(), *model.buffers()]):
        raise UsageError("a model on the meta device has no data to be measured with")
    graph = trace(model, example)
    with undisturbed(model):
        model.train()
        costs = []
        counted: set[int] = set()
        values: tuple[Any, ...] = tuple(pytree.tree_leaves(example))
        for name, stage in _pieces(graph):
            cost, values = _measure(name, stage, values, repeats, counted)
            costs.append(cost)
    return _summed(graph, costs)


def to_plain(costs: Sequence[LayerCost]) -> list[dict[str, Any]]:
    """Return the numbers as plain data, fit for JSON."""
    plain: list[dict[str, Any]] = msgspec.to_builtins(list(costs))
    return plain


def costs_table(costs: Sequence[LayerCost]) -> str:
    """Return the costs as a table to be printed."""
    width = max([5, *(len(cost.name) for cost in costs)])
    lines = [
        f"{'layer':<{width}}  {'forward':>10}  {'backward':>10}  {'parameters':>11}  "
        f"{'kept':>11}  {'output':>11}"
    ]
    for cost in costs:
        sizes = (cost.parameter_bytes, cost.activation_bytes, cost.output_bytes)
        times = (cost.forward_s, cost.backward_s)
        lines.append(
            f"{cost.name:<{width}}  "
            + "  ".join(f"{1e3 * one:>7.3f} ms" for one in times)
            + "  "
            + "  ".join(f"{one / 1e6:>8.3f} MB" for one in sizes)
        )
    return "\n".join(lines)


def _pieces(graph: LayerGraph) -> list[tuple[str, StageModule]]:
    """Cut at every call of a layer where that is possible."""
    names = [name for _, name in graph.training.layer_calls()]
    if not names:
        raise UsageError(f"the forward pass of {type(graph.model).__name__} calls no layers")
    calls, stages = _cut_everywhere(graph, names, list(range(1, len(names))))
    return [(names[call], stage) for call, stage in zip([0, *calls], stages, strict=True)]


def _cut_everywhere(
    graph: LayerGraph, names: list[str], calls: list[int]
) -> tuple[list[int], list[StageModule]]:
    try:
        return calls, make_stages(graph, calls)
    except CannotCut as error:
        # It is measured with the layer before it.
        left = [call for call in calls if names[call] != error.layer]
        return _cut_everywhere(graph, names, left)


def _measure(
    name: str, stage: StageModule, values: tuple[Any, ...], repeats: int, counted: set[int]
) -> tuple[LayerCost, tuple[torch.Tensor, ...]]:
    inputs = [
        one.detach().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one
        for one in values
    ]
    kept = _Kept(stage)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda one: one):
        outputs = stage(*inputs)  # the warm-up
    _backward(outputs)
    forward, backward = [], []
    for _ in range(repeats):
        for one in [*stage.parameters(), *inputs]:
            if isinstance(one, torch.Tensor):
                one.grad = None
        begin = _now(outputs)
        outputs = stage(*inputs)
        middle = _now(outputs)
        _backward(outputs)
        forward.append(middle - begin)
        backward.append(_now(outputs) - middle)
    new = [param for param in stage.parameters() if id(param) not in counted]
    counted.update(id(param) for param in new)
    cost = LayerCost(
        name,
        min(forward),
        min(backward),
        parameter_bytes=sum(_num_bytes(param) for param in new),
        activation_bytes=kept.num_bytes,
        output_bytes=sum(_num_bytes(one) for one in outputs),
    )
    return cost, outputs


def _backward(outputs: tuple[torch.Tensor, ...]) -> None:
    # What only passes through has no grad_fn, and costs nothing.
    ends = [one for one in outputs if one.grad_fn is not None]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(one) for one in ends])


class _Kept:
    """Counts the memory that backward keeps, each piece of it once."""

    def __init__(self, stage: StageModule) -> None:
        state = [*stage.parameters(), *stage.buffers()]
        self._seen = {one.untyped_storage().data_ptr() for one in state}
        self._keep: list[torch.Tensor] = []  # no address is used twice
        self.num_bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._keep.append(tensor.detach())
            self.num_bytes += storage.nbytes()
        return tensor


def _summed(graph: LayerGraph, costs: list[LayerCost]) -> list[LayerCost]:
    """Return one cost per layer, in the graph's order."""
    found = []
    for name in graph.layers:
        own = [cost for cost in costs if cost.name == name]
        calls = max(1, graph.repeated.get(name, 1))
        found.append(
            LayerCost(
                name,
                sum(cost.forward_s for cost in own),
                sum(cost.backward_s for cost in own),
                sum(cost.parameter_bytes for cost in own),
                sum(cost.activation_bytes for cost in own),
                own[-1].output_bytes if own else 0,
                calls,
            )
        )
    return found


def _num_bytes(one: torch.Tensor) -> int:
    return one.numel() * one.element_size()


def _now(outputs: tuple[torch.Tensor, ...]) -> float:
    """Return the time when all that was started is done.

    On one thread it is the thread's own time: other processes on the same cores, which may be
    measuring as well, would otherwise make long layers look longer than short ones.
    """
    if any(one.is_cuda for one in outputs):
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()
