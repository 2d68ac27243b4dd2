"""Styles: how one module is sharded, and sharding it; ours and torch's.

A style of ours is a kind and a number of blocks. `shard_module` shards a module's parameters (and a
norm's buffers) in place, in the objects that optimizers and tied modules already refer to, and
changes its class; `undo` restores everything if probing finds that the result differs.

torch's styles (ColwiseParallel, SequenceParallel, PrepareModuleInput ...) turn parameters into
DTensors. Ours stay plain: a style is applied as torch does it, then each DTensor's local tensor is
put back into the original parameter, and a new DTensor is created around it while the module runs.
Autograd leads through that into the plain parameter, and completes the gradients of replicated
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from paceline.errors import UsageError
from paceline.model_parallel.sharding.layout import Slice, SliceSpec
from paceline.model_parallel.tensor.axis import Axis
from paceline.model_parallel.tensor.layers import (
    CLASSES,
    CONVOLUTIONS,
    LayerSharding,
)

KINDS = ("column", "row", "embedding", "vocabulary", "attention", "norm", "replicate")


@dataclass(frozen=True)
class Style:
    """How a module is sharded."""

    kind: str
    blocks: int = 1  # of the sharded dimension; every process has a shard of each block

    def __str__(self) -> str:
        return self.kind if self.blocks == 1 else f"{self.kind}, {self.blocks} blocks"


def shard_dims(module: nn.Module, style: Style) -> dict[str, tuple[int, int]]:
    """Return dimension and blocks for each parameter and buffer that the style shards."""
    if style.kind == "row":
        return {"weight": (1, style.blocks)}
    if style.kind == "attention":
        named = {name: (0, 1) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")}
        named |= {name: (0, 3) for name in ("in_proj_weight", "in_proj_bias")}
        named["out_proj.weight"] = (1, 1)
        return {name: dims for name, dims in named.items() if _find(module, name) is not None}
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {name: (0, style.blocks) for name, tensor in own if tensor.ndim > 0}


def indivisible(module: nn.Module, style: Style, count: int) -> tuple[int, str] | None:
    """Return the size that the axis does not divide, and what it is of; None if all divide."""
    sizes: dict[str, tuple[str, str]] = {
        "column": ("out_channels", "output channels")
        if isinstance(module, CONVOLUTIONS)
        else ("out_features", "output features (rows)"),
        "row": ("in_channels", "input channels")
        if isinstance(module, CONVOLUTIONS)
        else ("in_features", "input features (columns)"),
        "vocabulary": ("out_features", "output features (rows)"),
        "embedding": ("num_embeddings", "rows"),
        "attention": ("num_heads", "heads"),
        "norm": ("num_features", "channels"),
    }
    attribute, what = sizes[style.kind]
    size = int(getattr(module, attribute))
    return None if size % (count * style.blocks) == 0 else (size, what)


def sharded_class(module: nn.Module, kind: str) -> type[nn.Module] | None:
    """Return the class of the sharded module; None if there is no such style for it."""
    if isinstance(module, CONVOLUTIONS) and module.groups != 1:
        return None
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return None
    if isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS)):
        plain = {"weight", "bias"} >= module._parameters.keys() >= {"weight"}
        if not plain:  # weight_norm and the like compute their weight
            return None
    return CLASSES.get((type(module), kind))


class ModuleSharder:
    """Shards modules; remembers how to undo that, and the specs of their parameters."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._undo: list[Callable[[], None]] = []
        self._done: dict[int, SliceSpec] = {}  # by id; tied parameters are sharded once

    def shard_module(self, sharding: LayerSharding, module: nn.Module, style: Style) -> None:
        """Shard a module in place."""
        for param_name, (dim, blocks) in shard_dims(module, style).items():
            tensor = _find(module, param_name)
            if id(tensor) not in self._done:
                self._shard(tensor, dim, blocks)
        was, becomes = type(module), sharded_class(module, style.kind)
        assert becomes is not None, f"{was.__name__} has no style {style.kind}"
        module.__class__ = becomes
        module.sharding = sharding  # type: ignore[assignment]

        def restore() -> None:
            module.__class__ = was
            del module.sharding

        self._undo.append(restore)

    def spec_of(self, param: Tensor) -> SliceSpec | None:
        """Return the spec of a parameter or buffer that was sharded here."""
        return self._done.get(id(param))

    def undo(self) -> None:
        """Restore everything."""
        for step in reversed(self._undo):
            step()
        self._undo.clear()
        self._done.clear()

    def _shard(self, tensor: Tensor, dim: int, blocks: int) -> None:
        one = self._axis.slice(dim, blocks)
        full = tensor.data
        self._done[id(tensor)] = SliceSpec(tuple(full.shape), (one,))
        tensor.data = one.of(full).clone(memory_format=torch.contiguous_format)
        tensor.grad = None

        def restore() -> None:
            tensor.data = full
            tensor.grad = None

        self._undo.append(restore)


def _find(module: nn.Module, name: str) -> Any:
    for step in name.split("."):
        module = getattr(module, step)
    return module


def apply_torch_styles(
    model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]
) -> dict[str, SliceSpec]:
    """Apply styles to modules in place; return the specs of the parameters that are sharded."""
    modules = dict(model.named_modules())
    places = [(module, name) for module in modules.values() for name in module._parameters]
    before = {(id(m), n): m._parameters[n] for m, n in places if m._parameters[n] is not None}
    parallelize_module(model, mesh, dict(styles))
    specs: dict[str, SliceSpec] = {}
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
                    f"tensor plan: {full} is the same parameter as {first}, but their styles"
                    f" shard it as {param.placements} and {placements}; give both the same style"
                )
            spec = _torch_spec(param, mesh)
            if spec is not None:
                specs[full] = spec
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
    return specs


def _torch_spec(param: DTensor, mesh: DeviceMesh) -> SliceSpec | None:
    (placement,) = param.placements
    if not isinstance(placement, Shard):
        return None
    one = Slice(placement.dim, mesh.get_local_rank(), mesh.size())
    return SliceSpec(tuple(param.shape), (one,))


def _show_views(module: nn.Module, mesh: DeviceMesh, views: Mapping[str, Any]) -> None:
    """Wrap the plain tensors in DTensors while the module runs."""
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
