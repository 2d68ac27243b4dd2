"""Materialize: give values to a model that was built on the meta device, one module at a time.

    with torch.device("meta"):
        model = GPT()

has shapes only, so it can be sharded even if no process could hold it. `MetaModel` keeps its
modules as they were before the sharding. Afterwards each module is created in full on the CPU, gets
its first values from `reset_parameters()` and the caller's `init(module)`, is sharded, and is
freed. Random numbers are seeded by the module's name, so that every mesh starts with the same
values. At most one full module exists at a time, together with the submodules that its reset
writes to (that of nn.MultiheadAttention writes to its projection).
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm.devices import CPU
from paceline.errors import UsageError
from paceline.model_parallel.sharding.layout import LocalShards

# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

Init = Callable[[nn.Module], object]


@dataclass
class MetaModel:
    """The modules of a full model before it was sharded: shapes, and how to reset them."""

    shapes: nn.Module  # a copy of the model, all on meta
    modules: dict[str, nn.Module]  # the model's own modules, which keep their buffers
    names: set[str]  # of the parameters that have no values yet

    @classmethod
    def of(cls, model: nn.Module) -> MetaModel:
        """Return the modules of a model; call it before the model is sharded."""
        known: dict[int, Any] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_meta:  # tensors with values are not copied
                known[id(tensor)] = _like(tensor, "meta")
        names = {name for name, param in model.named_parameters() if param.is_meta}
        return cls(copy.deepcopy(model, known), dict(model.named_modules()), names)


def materialize(
    shards: LocalShards,
    meta_model: MetaModel,
    seed: int,
    init: Init | None = None,
    device: torch.device = CPU,
) -> None:
    """Give first values to the local shards, and to the buffers, that are on meta.

    They are made on the CPU, with the same random numbers for every device, and then moved to
    `device`. The parameters stay the same objects. `init` is called for each module after its own
    reset, as by `model.apply(init)`. UsageError names what neither of them gives a value to.

    A model that is built on meta is large, so from here on this process returns the memory of large
    tensors to the system when they are freed.
    """
    if meta_model.names:
        return_freed_memory()
    made: set[str] = set()
    for name, shape in meta_model.shapes.named_modules():
        if name in made or not _is_wanted(name, shape, shards, meta_model, init):
            continue
        with _MaterializedModules() as made_here:
            below = {n: m for n, m in shape.named_modules(prefix=name) if m is not shape}
            made_here.add(name, shape)
            made_here.reset(name, shape, seed, init)
            if made_here.has_reached(below.values()):
                for inner_name, inner in reversed(below.items()):
                    made_here.add(inner_name, inner)
                    made_here.reset(inner_name, inner, seed, init)
                made_here.reset(name, shape, seed, init)
            made.update(made_here.names)
            for path, value in made_here.values():
                _give(path, value.detach(), shards, meta_model, device)
    for name, shard in shards.items():
        if shard.tensor.is_meta:
            raise UsageError(
                f"parameter {name} is on the meta device, and was not in the model when it was"
                " sharded; add parameters before distribute()"
            )


def _is_wanted(
    name: str, shape: nn.Module, shards: LocalShards, meta_model: MetaModel, init: Init | None
) -> bool:
    """Return whether a module, or its reset, gives values to what this process holds."""
    prefix = f"{name}." if name else ""
    if any(n.startswith(prefix) and n in meta_model.names for n in shards):
        has_own = any(f"{prefix}{own}" in shards for own in shape._parameters)
        is_reset = init is not None or bool(_resets(shape))
        return has_own or is_reset or _has_meta_buffers(meta_model.modules[name])
    # The process that holds a module's parameters materializes its buffers too.
    is_bare = not any(True for _ in shape.parameters())
    return is_bare and _has_meta_buffers(meta_model.modules[name])


def _has_meta_buffers(module: nn.Module) -> bool:
    return any(buffer.is_meta for buffer in module.buffers(recurse=False))


def _give(
    path: str,
    value: torch.Tensor,
    shards: LocalShards,
    meta_model: MetaModel,
    device: torch.device,
) -> None:
    """Write a value to the tensor of that name, if it is on meta."""
    shard = shards.get(path)
    if shard is not None and shard.tensor.is_meta:
        values = shard.spec.of(value).clone().to(device)
        real = nn.Parameter(values, requires_grad=shard.tensor.requires_grad)
        swap_tensors(shard.tensor, real)  # .data cannot be set to another device
        return
    module, own = meta_model.modules[path.rpartition(".")[0]], path.rpartition(".")[2]
    buffer = module._buffers.get(own)
    if buffer is not None and buffer.is_meta:
        module._buffers[own] = value.to(device)


class _MaterializedModules(TorchDispatchMode):
    """Modules that have memory during a `with`, and the tensors that are written in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes: dict[str, nn.Module] = {}
        self._real: dict[str, torch.Tensor] = {}
        self._written: set[int] = set()  # storages
        self._undo = contextlib.ExitStack()

    @property
    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def add(self, name: str, shape: nn.Module) -> None:
        """Allocate a module's own tensors, without values."""
        self._shapes[name] = shape
        for own, kind, tensor in _own(shape):
            kind[own] = self._real[f"{name}.{own}".lstrip(".")] = _like(tensor, "cpu")
            self._undo.callback(kind.__setitem__, own, tensor)

    def reset(self, name: str, shape: nn.Module, seed: int, init: Init | None) -> None:
        """Call a module's reset and the caller's init, with random numbers of its own."""
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            for call in _resets(shape):
                call()
            if init is not None:
                init(shape)

    def has_reached(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether tensors of these modules were written."""
        return any(_storage(t) in self._written for module in modules for _, _, t in _own(module))

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with their names; UsageError if one was never written."""
        for name, shape in self._shapes.items():
            for own, _, tensor in _own(shape):
                path = f"{name}.{own}".lstrip(".")
                is_made = self._real.get(path) is tensor
                if is_made and tensor.numel() and _storage(tensor) not in self._written:
                    raise UsageError(_without_value(name, own, shape))
                yield path, tensor

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        given.update(kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                values = given.get(argument.name)
                for tensor in values if isinstance(values, (list, tuple)) else [values]:
                    if isinstance(tensor, torch.Tensor):
                        self._written.add(_storage(tensor))
        return func(*args, **(kwargs or {}))


def _own(module: nn.Module) -> list[tuple[str, dict[str, Any], torch.Tensor]]:
    kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    return [(name, kind, t) for kind in kinds for name, t in kind.items() if t is not None]


def _resets(module: nn.Module) -> list[Callable[[], object]]:
    # torch spells it with an underscore in a few modules.
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return [reset for reset in found if callable(reset)][:1]


def _like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def return_freed_memory() -> None:
    """Have glibc map every allocation of 256 KB or more, so that freeing it returns the memory.

    Otherwise glibc keeps it for later allocations, which may not fit: with parameters that are
    gathered and freed in every block, a process grew to twice what was in use. The cost: new memory
    has to be cleared, about 0.5 s per GB. data_parallel sets the opposite, for speed, so call this
    again after it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other systems return it anyway
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 18)
        mallopt(_TRIM_THRESHOLD, 1 << 18)


def _without_value(name: str, own: str, module: nn.Module) -> str:
    kind = "parameter" if own in module._parameters else "buffer"
    where = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
    return (
        f"{where}: nothing gives a first value to its {kind} {own!r}, which is on the meta device;"
        " write it in the module's reset_parameters(), or pass init=, a function that is called"
        " with each module"
    )
