"""Which stage holds which layers, parameters and buffers of the model.

Each has what it uses. What no stage uses stays with whatever stands before it in the model, so that
all stages together hold the whole; what several use is in each of them, under one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.model_parallel.pipeline.program import Program
from paceline.model_parallel.pipeline.stage_module import StageModule


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
