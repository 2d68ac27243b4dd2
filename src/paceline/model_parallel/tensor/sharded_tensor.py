"""CutTensor: a process's piece of a tensor, which answers with the whole's shape.

A model's own code is full of whole sizes: `view(B, T, HEADS, -1)`, `split(self.width, 2)`. So what
a cut layer returns says that it has the shape of the whole and carries the local piece: a
dimension, seen as `blocks` blocks of equal size, of each of which there is a piece (q, k and v out
of one matrix are three blocks). Rules (rules.py) say what an operation does with pieces. Where
there is none, pieces are gathered, and what follows runs on whole tensors: slower, not wrong.

Autograd runs on the local pieces; the wrapper is not part of any graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.model_parallel.tensor.axis import Axis


class NoRule(Exception):
    """An operation needs more than pieces; says why."""


Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[str, Rule] = {}  # by the name of the function or method

# Attributes and methods that the wrapper's own shape, dtype and device answer.
_OF_THE_PIECE = {"requires_grad", "grad_fn", "is_leaf"}


class CutTensor(Tensor):
    """See the module. `origins`: the modules that had a share in it."""

    local: Tensor
    cut_dim: int
    blocks: int
    axis: Axis
    origins: frozenset[str]

    @staticmethod
    def __new__(
        cls: type[CutTensor],
        local: Tensor,
        dim: int,
        axis: Axis,
        origins: frozenset[str],
        blocks: int = 1,
    ) -> CutTensor:
        shape = list(local.shape)
        shape[dim] *= axis.count
        self: CutTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        self.local, self.cut_dim, self.blocks = local, dim, blocks
        self.axis, self.origins = axis, origins
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return (
            f"CutTensor(shape={tuple(self.shape)}, dim={self.cut_dim}, blocks={self.blocks},"
            f" piece {self.axis.index} of {self.axis.count})"
        )

    def like(self, local: Tensor, dim: int, blocks: int | None = None) -> CutTensor:
        """Wrap a local result that comes from this one."""
        return CutTensor(local, dim, self.axis, self.origins, blocks or self.blocks)

    def whole(self) -> Tensor:
        """Return the whole tensor; collective."""
        return self.axis.gather(self.local, self.cut_dim, self.blocks, min(self.origins))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func.__name__
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
            if name in _OF_THE_PIECE:
                return getattr(args[0].local, name)
            if name not in RULES and name not in ("data", "grad", "real", "imag", "H"):
                name = "size"
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = RULES.get(name)
        try:
            if rule is None:
                raise NoRule(f"{name} needs all of it")
            return rule(func, args, kwargs)
        except NoRule as why:
            return _on_wholes(func, name, args, kwargs, str(why))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached only by code that goes around __torch_function__.
        args, kwargs = gathered((args, kwargs or {}))
        return func(*args, **kwargs)


def _on_wholes(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], why: str
) -> Any:
    """Do an operation on gathered tensors; what it writes to goes back into its piece."""
    for cut in cuts_in((args, kwargs)):
        cut.axis.on_gather(cut.origins, why)
    wholes, named = gathered((args, kwargs))
    result = func(*wholes, **named)
    target = args[0] if args else None
    if not (is_in_place(name) and isinstance(target, CutTensor)):
        return result
    axis, label = target.axis, min(target.origins)
    target.local = axis.piece(wholes[0], target.cut_dim, target.blocks, label).clone()
    return None if result is None else target


def is_in_place(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


_NOT_IN_PLACE = {"__invert__", "__iter__", "__int__", "__index__"}

_METADATA = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "get_device"),
    *(
        "is_floating_point",
        "is_complex",
        "element_size",
        "storage_offset",
        "is_pinned",
        "is_signed",
    ),
    *("__len__", "__hash__", "is_shared", "is_inference", "is_neg", "is_conj", "__reversed__"),
}


def cuts_in(tree: Any) -> Iterator[CutTensor]:
    """Yield the cut tensors in nested tuples, lists and dicts."""
    if isinstance(tree, CutTensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from cuts_in(item)
    elif isinstance(tree, dict):
        yield from cuts_in(list(tree.values()))


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the tree with every tensor in it changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        items = [mapped(item, change) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: mapped(item, change) for key, item in tree.items()}
    return tree


def gathered(tree: Any) -> Any:
    """Return the tree with whole tensors."""
    return mapped(tree, lambda t: t.whole() if isinstance(t, CutTensor) else t)
