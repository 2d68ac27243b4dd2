"""Cut a traced model into stages at layers that are given by name.

The names stand for calls in the recorded pass, and the pass is cut before these.

Each stage holds the layers, parameters and buffers that it uses. What no stage uses stays with the
layer before it in the model, so that all stages together hold the whole; what several stages use is
in each of them, under one name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.model_parallel.pipeline.graph import LayerGraph, Pass
from paceline.model_parallel.pipeline.program import Program, make_programs
from paceline.model_parallel.pipeline.stage_module import StageModule as StageModule


def split(graph: LayerGraph, starts: Sequence[str]) -> list[StageModule]:
    """Cut the model before the layers that are named, in order; returns one stage more than names.

    A name may also be that of a module inside of a layer (which is then cut), or around layers (its
    first one is meant). The graph itself is not changed.
    """
    graph, names = _resolve(graph, starts)
    return make_stages(graph, [_call_of(graph, name) for name in names])


def make_stages(graph: LayerGraph, calls: Sequence[int]) -> list[StageModule]:
    """Cut the model before calls of layers, numbered as in the training pass."""
    training = list(graph.training.layer_calls())
    programs: list[dict[bool, Program | UsageError]] = [
        {True: one} for one in make_programs(graph.training, [training[n][0] for n in calls])
    ]
    if isinstance(graph.evaluation, UsageError):
        for one in programs:
            one[False] = graph.evaluation
    else:
        cuts = _same_cuts(graph.evaluation, [name for _, name in training], calls)
        for one, program in zip(programs, make_programs(graph.evaluation, cuts), strict=True):
            one[False] = program
    stages = [
        StageModule(index, one, [] if index else graph.example[0])
        for index, one in enumerate(programs)
    ]
    share_out(graph.model, stages)
    return stages


def _resolve(graph: LayerGraph, starts: Sequence[str]) -> tuple[LayerGraph, list[str]]:
    """Find the layers that the names stand for, opening the modules around them if need be."""
    modules = {name: module for name, module in graph.model.named_modules() if name}
    for name in starts:
        if name not in modules:
            raise UsageError(_no_such_module(name, graph.layers, modules))
    covered = [name for name in starts if not _layers_in(graph, name)]
    if covered:
        graph = graph.retrace(covered)
    names = []
    for name in starts:
        layers = _layers_in(graph, name)
        if not layers:
            raise UsageError(_not_a_layer(graph, name))
        names.append(layers[0])
    _check_order(graph, names)
    return graph, names


def _layers_in(graph: LayerGraph, name: str) -> list[str]:
    return [one for one in graph.layers if one == name or one.startswith(f"{name}.")]


def _check_order(graph: LayerGraph, names: list[str]) -> None:
    order = {name: position for position, name in enumerate(graph.layers)}
    for name in names:
        if name in graph.repeated:
            raise UsageError(
                f"no stage can start at {name!r}: it is called {graph.repeated[name]} times in one "
                "forward pass. Start it at a layer that is called once"
            )
        if names.count(name) > 1:
            raise UsageError(f"two stages start at {name}; every stage needs a layer of its own")
    if names and order[names[0]] == 0:
        raise UsageError(
            f"stage 1 starts at {names[0]}, the model's first layer: nothing is left for stage 0. "
            "Name the layers at which stages 1, 2, ... start"
        )
    for before, after in zip(names, names[1:], strict=False):
        if order[before] > order[after]:
            ordered = sorted(names, key=lambda name: order[name])
            raise UsageError(
                f"{after} runs before {before}, so a stage that starts there cannot come after it; "
                f"in the order of execution: {', '.join(ordered)}"
            )


def _no_such_module(name: str, layers: list[str], modules: dict[str, nn.Module]) -> str:
    close = difflib.get_close_matches(name, modules, n=3)
    some = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    return (
        f"no stage can start at {name!r}: the model has no such module.{meant} Layers are: {some}"
    )


def _not_a_layer(graph: LayerGraph, name: str) -> str:
    for closed, why in graph.closed.items():
        if name.startswith(f"{closed}."):
            return f"no stage can start at {name!r}: {closed} cannot be cut, since {why}"
    for layer in graph.layers:
        if name.startswith(f"{layer}."):
            return (
                f"no stage can start at {name!r}: it is inside of {layer}, which was to stay whole"
            )
    return f"no stage can start at {name!r}: the forward pass does not call it"


def _call_of(graph: LayerGraph, name: str) -> int:
    return [one for _, one in graph.training.layer_calls()].index(name)


def _same_cuts(recorded: Pass, training: list[str], calls: Sequence[int]) -> list[int]:
    """Cut another pass at the same layers; it may lack some, or call others."""
    cuts: list[int] = []
    for call in calls:
        before = training[:call]
        cut = len(recorded.nodes)
        for index, name in recorded.layer_calls():
            if name in before:
                before.remove(name)
            elif name in training:
                cut = index
                break
        cuts.append(max([cut, *cuts]))
    return cuts


def share_out(model: nn.Module, stages: Sequence[StageModule]) -> None:
    """Give every stage its layers, parameters and buffers, and what nobody uses to somebody."""
    layers, tensors = [], []
    for stage in stages:
        programs = [one for one in stage._programs.values() if isinstance(one, Program)]
        layers.append(set[str]().union(*(one.layers for one in programs)))
        tensors.append(set[str]().union(*(one.state for one in programs)))
    holder: dict[int, int] = {}  # tensors by id
    unused: list[tuple[str, torch.Tensor, int]] = []
    last = 0
    for name, tensor in _all_tensors(model):
        parents = {name[:at] for at, letter in enumerate(name) if letter == "."}
        where = [n for n in range(len(stages)) if name in tensors[n] or parents & layers[n]]
        if where:
            last = where[0]
            holder.setdefault(id(tensor), last)
        else:
            unused.append((name, tensor, last))
    for name, tensor, default in unused:
        tensors[holder.get(id(tensor), default)].add(name)
    first_names = {id(param): name for name, param in model.named_parameters()}
    for stage, own_layers, own_tensors in zip(stages, layers, tensors, strict=True):
        _fill(stage, model, "", own_layers, own_tensors)
        stage.training = model.training
        for name, param in stage.named_parameters(remove_duplicate=False):
            if first_names[id(param)] != name:
                stage._first_names[name] = first_names[id(param)]


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Go through parameters and buffers with all of their names, module by module."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{key}" if prefix else key, tensor


def _fill(
    into: nn.Module, module: nn.Module, prefix: str, layers: set[str], tensors: set[str]
) -> None:
    """Rebuild the part of the module's tree that leads to the layers and tensors, in its order."""
    for key, param in module._parameters.items():
        if prefix + key in tensors:
            into._parameters[key] = param
    for key, buffer in module._buffers.items():
        if prefix + key in tensors:
            into._buffers[key] = buffer
            if key in module._non_persistent_buffers_set:
                into._non_persistent_buffers_set.add(key)
    for key, child in _children(module):
        name = prefix + key
        if name in layers:
            into._modules[key] = child
            continue
        inside = nn.Module()
        _fill(inside, child, f"{name}.", layers, tensors)
        if inside._parameters or inside._buffers or inside._modules:
            into._modules[key] = inside


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Go through the children with all of their names."""
    for key, child in module._modules.items():
        if child is not None:
            yield key, child


def shared(stages: Sequence[StageModule]) -> dict[str, list[int]]:
    """Return the parameters that are in several stages, with the stages' numbers."""
    holders: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name, _ in stage.named_parameters():
            holders.setdefault(name, []).append(index)
    return {name: where for name, where in holders.items() if len(where) > 1}


def release_others(model: nn.Module, stages: Sequence[StageModule]) -> None:
    """Give up the memory of all parameters and buffers of the model that are not in these stages.

    They are on the meta device then, so the model can still be traced, and cut, for other shapes.
    """
    own = {id(one) for stage in stages for one in [*stage.parameters(), *stage.buffers()]}
    empty: dict[int, torch.Tensor] = {}  # so that tied ones stay tied
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in holders:
            for key, one in held.items():
                if one is None or id(one) in own:
                    continue
                if id(one) not in empty:
                    like = torch.empty_like(one, device="meta")
                    is_parameter = isinstance(one, nn.Parameter)
                    empty[id(one)] = nn.Parameter(like, one.requires_grad) if is_parameter else like
                held[key] = empty[id(one)]
