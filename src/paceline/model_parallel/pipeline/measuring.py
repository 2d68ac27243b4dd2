"""Measure the layers of a model: time, parameters, what backward keeps, what the next layer gets.

The model is split at every layer, and the sections run one after the other on the example: a
section is a layer with the code that follows it up to the next one, which always runs in the same
stage. So what is measured is what a stage would run. The first section includes the code before the
first layer.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.comm.devices import devices_of, synchronize
from paceline.errors import UsageError
from paceline.model_parallel.dry_run import dry_run
from paceline.model_parallel.pipeline.graph import LayerGraph
from paceline.model_parallel.pipeline.splitting import StageModule, make_stages
from paceline.model_parallel.pipeline.stage_program import CannotSplit
from paceline.model_parallel.pipeline.tracing import trace


class LayerCost(msgspec.Struct, frozen=True):
    """What one layer costs, for one batch like the example."""

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int  # tied parameters count where they are first used
    activation_bytes: int  # what is kept for backward, without parameters
    output_bytes: int  # what a stage boundary after it would send
    calls: int = 1  # in one forward pass; times and activations are the sums over them


def measure_layers(model: nn.Module, *example: Any, repeats: int = 3) -> list[LayerCost]:
    """Run every layer forward and backward on the example; the fastest of the repeats counts.

    The model, its buffers and gradients, and the random state are restored.
    """
    if repeats < 1:
        raise UsageError(f"repeats={repeats}: expected a number of at least 1")
    if any(one.device.type == "meta" for one in [*model.parameters(), *model.buffers()]):
        raise UsageError("a model on the meta device has no data to be measured with")
    graph = trace(model, example)
    with dry_run(model):
        model.train()
        costs = []
        counted: set[int] = set()
        values: tuple[Any, ...] = tuple(pytree.tree_leaves(example))
        for name, stage in _sections(graph):
            cost, values = _measure(name, stage, values, repeats, counted)
            costs.append(cost)
    return _summed(graph, costs)


def _sections(graph: LayerGraph) -> list[tuple[str, StageModule]]:
    """Split at every call of a layer where that is possible."""
    names = [name for _, name in graph.training.layer_calls()]
    if not names:
        raise UsageError(f"the forward pass of {type(graph.model).__name__} calls no layers")
    calls, stages = _split_everywhere(graph, names, list(range(1, len(names))))
    return [(names[call], stage) for call, stage in zip([0, *calls], stages, strict=True)]


def _split_everywhere(
    graph: LayerGraph, names: list[str], calls: list[int]
) -> tuple[list[int], list[StageModule]]:
    try:
        return calls, make_stages(graph, calls)
    except CannotSplit as error:
        # Measure it with the layer before it.
        left = [call for call in calls if names[call] != error.layer]
        return _split_everywhere(graph, names, left)


def _measure(
    name: str, stage: StageModule, values: tuple[Any, ...], repeats: int, counted: set[int]
) -> tuple[LayerCost, tuple[torch.Tensor, ...]]:
    inputs = [
        one.detach().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one
        for one in values
    ]
    kept = _SavedBytes(stage)
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
    # A tensor that only passes through has no grad_fn, and costs nothing.
    ends = [one for one in outputs if one.grad_fn is not None]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(one) for one in ends])


class _SavedBytes:
    """Counts the memory that backward keeps, each storage once."""

    def __init__(self, stage: StageModule) -> None:
        state = [*stage.parameters(), *stage.buffers()]
        self._seen = {one.untyped_storage().data_ptr() for one in state}
        self._keep: list[torch.Tensor] = []  # keeps them alive, so that no address is reused
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
    """Return the time, after all work on the outputs is done.

    With one thread it is the thread's CPU time: otherwise other processes on the same cores, which
    may be measuring as well, would make long layers look longer than short ones.
    """
    if found := devices_of(outputs):
        synchronize(found[0])
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()
