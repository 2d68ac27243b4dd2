"""Plans with torch's own styles (ColwiseParallel, SequenceParallel, PrepareModuleInput ...).

torch's styles turn parameters into DTensors. Ours stay plain: a style is applied as torch does it,
then each DTensor's local tensor goes back into the parameter that was there before, and the DTensor
is made anew around it while the module runs. Autograd leads through that into the plain parameter,
and completes the gradients of replicated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from paceline.errors import UsageError
from paceline.model_parallel.parts.layout import Part, Slice


def apply_torch_styles(
    model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]
) -> dict[str, Part]:
    """Apply styles to modules in place; return the parts of the parameters that are cut."""
    modules = dict(model.named_modules())
    places = [(module, name) for module in modules.values() for name in module._parameters]
    before = {(id(m), n): m._parameters[n] for m, n in places if m._parameters[n] is not None}
    parallelize_module(model, mesh, dict(styles))
    parts: dict[str, Part] = {}
    done: dict[int, tuple[str, Any]] = {}
    for name, module in modules.items():
        views: dict[str, Any] = {}
        for attribute, param in list(module._parameters.items()):
            if not isinstance(param, DTensor):
                continue
            full = f"{name}.{attribute}" if name else attribute
            plain = before[id(module), attribute]
            assert plain is not None
            first, placements = done.setdefault(id(plain), (full, param.placements))
            if placements != param.placements:
                raise UsageError(
                    f"tensor plan: {full} is the same parameter as {first}, but their styles cut"
                    f" it as {param.placements} and {placements}; give both the same cut"
                )
            part = _part_of(param, mesh)
            if part is not None:
                parts[full] = part
            if first == full:
                plain.data = param.to_local().detach().clone()
            views[attribute] = param.detach()
            module._parameters[attribute] = plain
        for attribute, buffer in list(module._buffers.items()):
            if isinstance(buffer, DTensor):
                module._buffers[attribute] = buffer.to_local()
                views[attribute] = buffer
        if views:
            _show_views(module, mesh, views)
    return parts


def _part_of(param: DTensor, mesh: DeviceMesh) -> Part | None:
    (placement,) = param.placements
    if not isinstance(placement, Shard):
        return None
    one = Slice(placement.dim, mesh.get_local_rank(), mesh.size())
    return Part(tuple(param.shape), (one,))


def _show_views(module: nn.Module, mesh: DeviceMesh, views: Mapping[str, Any]) -> None:
    """Put DTensors around the plain tensors while the module runs."""
    layouts = {name: (v.placements, v.shape, v.stride()) for name, v in views.items()}
    kept: list[tuple[dict[str, Any], str, Tensor]] = []

    def show(_module: nn.Module, _args: Any) -> None:
        for name, (placements, shape, stride) in layouts.items():
            table: dict[str, Any] = (
                module._parameters if name in module._parameters else module._buffers
            )
            plain = table[name]
            if isinstance(plain, DTensor):
                continue
            kept.append((table, name, plain))
            table[name] = DTensor.from_local(
                plain, mesh, placements, run_check=False, shape=shape, stride=stride
            )

    def hide(_module: nn.Module, _args: Any, _output: Any) -> None:
        while kept:
            table, name, plain = kept.pop()
            table[name] = plain

    hooks: tuple[Callable[..., Any], Callable[..., Any]] = (show, hide)
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1], always_call=True)
