"""Trace a model: find its layers, run the forward pass once, and record it as a `LayerGraph`.

The pass is run on the example itself, without gradients between layers. A model with tensors on the
meta device is run without data (on fake tensors), so that a model that does not fit into this
process can be traced. Training and evaluation are recorded separately: code between layers may read
`self.training`.

A module whose forward cannot be recorded becomes one layer; for the model itself that is an error,
because there would be nothing to split.

Layers are never split. They are found from the outside in: the model itself is opened (its forward
is recorded), and so are the modules around blocks: a container (Sequential, ModuleList,
ModuleDict), and a module that holds a container of modules which have submodules themselves (an
encoder with its list of blocks). Every other module is a layer: the elements of containers, and
modules without such containers. A container inside of an element is opened only if it holds blocks
too (a Sequential of Sequentials of blocks).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from paceline.comm.devices import CPU
from paceline.errors import UsageError
from paceline.model_parallel.dry_run import dry_run
from paceline.model_parallel.pipeline.graph import ForwardPass, LayerGraph, Shape
from paceline.model_parallel.pipeline.recorder import ForwardRecorder, recording
from paceline.model_parallel.pipeline.trace_errors import CannotRecord


def trace(model: nn.Module, example: tuple[Any, ...], device: torch.device = CPU) -> LayerGraph:
    """Record the model's forward pass for inputs of the example's shapes.

    `device`: where tensors on the meta device are going to be. The model is not changed. Raises
    UsageError if the code of the model itself depends on the values of tensors.
    """
    _check_inputs(model, example)
    return _trace(model, tuple(example), (), device)


def _trace(
    model: nn.Module, example: tuple[Any, ...], inside: Sequence[str], device: torch.device
) -> LayerGraph:
    closed: dict[str, str] = {}
    passes = _record_both(model, example, inside, closed, device)
    while passes is None:
        passes = _record_both(model, example, inside, closed, device)
    training, evaluation = passes
    flat, spec = pytree.tree_flatten(example)
    shapes = [
        Shape(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in flat
    ]

    def retrace(names: Sequence[str]) -> LayerGraph:
        return _trace(model, example, names, device)

    return LayerGraph(model, training, evaluation, (shapes, spec), closed, retrace)


def _record_both(
    model: nn.Module,
    example: tuple[Any, ...],
    inside: Sequence[str],
    closed: dict[str, str],
    device: torch.device,
) -> tuple[ForwardPass, ForwardPass | UsageError] | None:
    """Record the pass in both modes; None: another module was closed, so start again."""
    opened = opened_modules(model, closed, inside)
    training: ForwardPass | None = None
    try:
        training = _run(model, example, opened, device, training=True)
        return training, _run(model, example, opened, device, training=False)
    except CannotRecord as error:
        if error.module:
            closed[error.module] = error.why
            return None
        explained = UsageError(_explain(model, error))
        if training is None:
            raise explained from None
        return training, explained  # it can be trained; evaluating it raises this


def _run(
    model: nn.Module,
    example: tuple[Any, ...],
    opened: set[str],
    device: torch.device,
    *,
    training: bool,
) -> ForwardPass:
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    state = [*model.parameters(), *model.buffers()]
    found = (one.device for one in [*tensors, *state] if one.device.type != "meta")
    device = next(found, device)
    is_meta = any(one.device.type == "meta" for one in [*tensors, *state])
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_meta else None
    with dry_run(model), torch.enable_grad():
        if training != model.training:
            model.train(training)
        recorder = ForwardRecorder(model, opened, device.type, mode or nullcontext())
        _register_state(recorder, model, mode, device)
        inputs = pytree.tree_map_only(
            torch.Tensor, lambda one: _stand_in(one, mode, device) if mode else one.clone(), example
        )
        for leaf in pytree.tree_leaves(inputs):
            if isinstance(leaf, torch.Tensor):
                recorder.add_input(leaf)
        with recording(recorder):
            recorder.set_outputs(model(*inputs))
    return recorder.recorded


def _register_state(
    recorder: ForwardRecorder, model: nn.Module, mode: FakeTensorMode | None, device: torch.device
) -> None:
    """Register parameters and buffers by name; without data, replace them by fake ones."""
    stand_ins: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for key, original in kind.items():
                if original is None:
                    continue
                used = stand_ins.get(id(original))
                if used is None:
                    used = _stand_in(original, mode, device) if mode else original
                    stand_ins[id(original)] = used
                name = f"{prefix}.{key}" if prefix else key
                is_parameter = kind is module._parameters
                recorder.add_state(name, original, used, is_parameter=is_parameter)
                if used is not original:
                    kind[key] = used


def _stand_in(one: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """Return a fake tensor, without data, in place of this one."""
    empty = torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="meta")
    fake = FakeTensor(mode, empty, device if one.device.type == "meta" else one.device)
    if isinstance(one, nn.Parameter):
        return nn.Parameter(fake, requires_grad=one.requires_grad)
    return fake


def _check_inputs(model: nn.Module, example: tuple[Any, ...]) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*example)
    except TypeError as error:
        raise UsageError(
            f"{type(model).__name__} does not take an example of {len(example)} inputs: {error}. "
            f"Its forward takes {signature}; the example is a tuple of its positional inputs"
        ) from None


def _explain(model: nn.Module, error: CannotRecord) -> str:
    return (
        f"{type(model).__name__} cannot be split into stages: in its forward, {error.why}\n"
        "Move this code into a submodule: that is then one layer, whose code may do anything"
    )


CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def opened_modules(model: nn.Module, closed: Collection[str], inside: Iterable[str]) -> set[str]:
    """Return the names of the modules whose forward is recorded, including the model ("").

    Modules in `closed` are never opened; modules around the names in `inside` always are.
    """
    opened = {""}
    _open_children(model, "", opened, in_container=isinstance(model, CONTAINERS))
    for name in inside:
        parts = name.split(".")
        opened.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return {name for name in opened if not _is_within(name, closed)}


def _open_children(module: nn.Module, prefix: str, opened: set[str], *, in_container: bool) -> None:
    for key, child in module.named_children():
        name = f"{prefix}.{key}" if prefix else key
        is_container = isinstance(child, CONTAINERS)
        if in_container:
            is_open = is_container and _holds_blocks(child)
        else:
            is_open = is_container or _holds_blocks(child)
        if is_open and not isinstance(child, torch.jit.ScriptModule):
            opened.add(name)
            _open_children(child, name, opened, in_container=is_container)


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether a container somewhere in the module has an element with submodules."""
    return any(
        isinstance(one, CONTAINERS) and any(_is_composite(element) for element in one.children())
        for one in module.modules()
    )


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_within(name: str, modules: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in modules)
