"""ShardedTensor: the local shard of a tensor, which has the shape of the full tensor.

A model's own code uses full sizes: `view(B, T, HEADS, -1)`, `split(self.width, 2)`. So what a
sharded layer returns reports the full shape and carries the local shard. The sharded dimension
consists of `blocks` blocks of equal size, and each block is sharded (q, k and v from one matrix are
three blocks). Rules (rules.py) define what an operation does with shards. Without a rule, shards
are gathered, and what follows runs on full tensors: slower, not wrong.

Autograd runs on the local shards; the wrapper is not part of any graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.model_parallel.tensor.axis import Axis


class NoRule(Exception):
    """An operation cannot run on shards; the message is the reason."""


Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[str, Rule] = {}  # by the name of the function or method

# Attributes and methods that the wrapper's own shape, dtype and device answer.
_OF_THE_SHARD = {"requires_grad", "grad_fn", "is_leaf"}


class ShardedTensor(Tensor):
    """See the module docstring. `origins`: the names of the modules that it was computed by."""

    local: Tensor
    shard_dim: int
    blocks: int
    axis: Axis
    origins: frozenset[str]

    @staticmethod
    def __new__(
        cls: type[ShardedTensor],
        local: Tensor,
        dim: int,
        axis: Axis,
        origins: frozenset[str],
        blocks: int = 1,
    ) -> ShardedTensor:
        shape = list(local.shape)
        shape[dim] *= axis.count
        self: ShardedTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        self.local, self.shard_dim, self.blocks = local, dim, blocks
        self.axis, self.origins = axis, origins
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return (
            f"ShardedTensor(shape={tuple(self.shape)}, dim={self.shard_dim}, blocks={self.blocks},"
            f" shard {self.axis.index} of {self.axis.count})"
        )

    def like(self, local: Tensor, dim: int, blocks: int | None = None) -> ShardedTensor:
        """Return a local result, computed from this tensor, as a sharded tensor."""
        return ShardedTensor(local, dim, self.axis, self.origins, blocks or self.blocks)

    def full_tensor(self) -> Tensor:
        """Return the full tensor. Collective."""
        return self.axis.gather(self.local, self.shard_dim, self.blocks, min(self.origins))

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
            if name in _OF_THE_SHARD:
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
            return _on_full_tensors(func, name, args, kwargs, str(why))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached only by code that bypasses __torch_function__.
        args, kwargs = gather_tensors((args, kwargs or {}))
        return func(*args, **kwargs)


def _on_full_tensors(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], why: str
) -> Any:
    """Run an operation on gathered tensors; what it writes is copied back into the shard."""
    for sharded in sharded_in((args, kwargs)):
        sharded.axis.on_gather(sharded.origins, why)
    full_args, named = gather_tensors((args, kwargs))
    result = func(*full_args, **named)
    target = args[0] if args else None
    if not (is_in_place(name) and isinstance(target, ShardedTensor)):
        return result
    axis, label = target.axis, min(target.origins)
    target.local = axis.shard(full_args[0], target.shard_dim, target.blocks, label).clone()
    return None if result is None else target


def is_in_place(name: str) -> bool:
    """Return whether a function of this name writes to its first argument."""
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


def sharded_in(tree: Any) -> Iterator[ShardedTensor]:
    """Yield the sharded tensors in nested tuples, lists and dicts."""
    if isinstance(tree, ShardedTensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from sharded_in(item)
    elif isinstance(tree, dict):
        yield from sharded_in(list(tree.values()))


def map_tensors(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the tree with every tensor replaced by what `change` returns for it."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(item, change) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: map_tensors(item, change) for key, item in tree.items()}
    return tree


def gather_tensors(tree: Any) -> Any:
    """Return the tree with full tensors in place of sharded ones. Collective."""
    return map_tensors(tree, lambda t: t.full_tensor() if isinstance(t, ShardedTensor) else t)


def tree_of(output: Any) -> Any:
    """Return a model's output as nested tuples and dicts (other libraries return objects)."""
    is_plain = isinstance(output, (Tensor, tuple, list, dict)) or not hasattr(output, "__dict__")
    return output if is_plain else dict(vars(output))
