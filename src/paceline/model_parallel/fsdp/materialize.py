"""Materialize: give values to a model that was built on the meta device, one module at a time.

    with torch.device("meta"):
        model = GPT()

has shapes only, so it can be cut for a mesh although nobody could hold it. `Recipes` remember its
modules as they were before the cuts. Behind them, each module is made whole on the cpu, gets its
first values from `reset_parameters()` and the caller's `init(module)`, is cut as the process holds
it, and is freed. Random numbers are seeded by the module's name, so that every mesh starts with the
same values. At most one module is there as a whole, or what its reset writes to below it (that of
nn.MultiheadAttention writes to its projection), which is then made together.
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

from paceline.errors import UsageError
from paceline.model_parallel.parts.layout import Holding

# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

Init = Callable[[nn.Module], object]


@dataclass
class Recipes:
    """The modules of a whole model as they were before it was cut: shapes, and how to reset."""

    shapes: nn.Module  # a copy of the model, all on meta
    modules: dict[str, nn.Module]  # the model's own ones, which keep their buffers
    names: set[str]  # of the parameters that have no values yet

    @classmethod
    def of(cls, model: nn.Module) -> Recipes:
        """Remember a model; to be called before the first cut."""
        known: dict[int, Any] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_meta:  # what has values is not copied, and stays as it is
                known[id(tensor)] = _like(tensor, "meta")
        names = {name for name, param in model.named_parameters() if param.is_meta}
        return cls(copy.deepcopy(model, known), dict(model.named_modules()), names)


def materialize(holding: Holding, recipes: Recipes, seed: int, init: Init | None = None) -> None:
    """Give their first values to the held parameters, and to the buffers, that are on meta.

    The parameters stay the same objects. `init` is called for each module behind its own reset, as
    by `model.apply(init)`. UsageError names what neither of them gives a value to.

    Who builds on meta is short of memory: from here on this process returns large tensors to the
    system when they are freed.
    """
    if recipes.names:
        return_freed_memory()
    made: set[str] = set()
    for name, shape in recipes.shapes.named_modules():
        if name in made or not _is_wanted(name, shape, holding, recipes, init):
            continue
        with _Made() as made_here:
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
                _give(path, value, holding, recipes)
    for name, held in holding:
        if held.param.is_meta:
            raise UsageError(
                f"parameter {name} is on the meta device, and was not in the model when it was cut;"
                " add parameters before distribute()"
            )


def _is_wanted(
    name: str, shape: nn.Module, holding: Holding, recipes: Recipes, init: Init | None
) -> bool:
    """Tell whether a module, or its reset, has something to do with what this process holds."""
    prefix = f"{name}." if name else ""
    if any(n.startswith(prefix) and n in recipes.names for n, _ in holding):
        has_own = any(f"{prefix}{own}" in holding.held for own in shape._parameters)
        is_reset = init is not None or bool(_resets(shape))
        return has_own or is_reset or _has_meta_buffers(recipes.modules[name])
    # Buffers of a module whose parameters another process holds are that one's too.
    is_bare = not any(True for _ in shape.parameters())
    return is_bare and _has_meta_buffers(recipes.modules[name])


def _has_meta_buffers(module: nn.Module) -> bool:
    return any(buffer.is_meta for buffer in module.buffers(recurse=False))


def _give(path: str, value: torch.Tensor, holding: Holding, recipes: Recipes) -> None:
    """Put a value to where the tensor of that name is on meta."""
    held = holding.held.get(path)
    if held is not None and held.param.is_meta:
        part = held.part.of(value.detach()).clone()
        real = nn.Parameter(part, requires_grad=held.param.requires_grad)
        swap_tensors(held.param, real)  # .data cannot be set to another device
        return
    module, own = recipes.modules[path.rpartition(".")[0]], path.rpartition(".")[2]
    buffer = module._buffers.get(own)
    if buffer is not None and buffer.is_meta:
        module._buffers[own] = value.detach()


class _Made(TorchDispatchMode):
    """Modules that are real for the length of a `with`, and which tensors are written to in it."""

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
        """Make a module's own tensors real, without values."""
        self._shapes[name] = shape
        for own, kind, tensor in _own(shape):
            kind[own] = self._real[f"{name}.{own}".lstrip(".")] = _like(tensor, "cpu")
            self._undo.callback(kind.__setitem__, own, tensor)

    def reset(self, name: str, shape: nn.Module, seed: int, init: Init | None) -> None:
        """Call a module's reset and the caller's, with random numbers of its own."""
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            for call in _resets(shape):
                call()
            if init is not None:
                init(shape)

    def has_reached(self, modules: Iterable[nn.Module]) -> bool:
        """Tell whether tensors of these modules were written to."""
        return any(_storage(t) in self._written for module in modules for _, _, t in _own(module))

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with their names; UsageError if one was never written to."""
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
    """Have glibc map every allocation of 256 KB or more, so that freeing it returns it.

    Else it is kept for later ones, of which other sizes cannot always be cut: with parameters that
    come and go in every block, a process grew to twice of what was in use. The price is that new
    memory has to be cleared: about 0.5 s per GB. data_parallel asks for the opposite, to be fast,
    so this is to be called again behind it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other systems return it anyhow
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
