"""Rules for shapes: views, orders of dimensions, taking apart and putting together."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.model_parallel.tensor.rules import Args, Func, Kwargs, agreed, from_end, rule
from paceline.model_parallel.tensor.sharded_tensor import CutTensor, NoRule


def reshaped(cut: CutTensor, shape: list[int]) -> CutTensor:
    """Return the cut tensor in another shape (of the whole).

    In memory order the whole is `outer` runs, each of which is cut into as many stretches as the
    axis is long. In the new shape the dimension that begins where those runs begin is the cut one;
    if it reaches further out, it has several blocks.
    """
    if -1 in shape:
        known = -math.prod(shape)
        shape = [cut.numel() // known if size == -1 else size for size in shape]
    outer = math.prod(cut.shape[: cut.cut_dim]) * cut.blocks
    for dim in reversed(range(len(shape))):
        before = math.prod(shape[:dim])
        if before == 0 or outer % before or shape[dim] % (outer // before):
            continue
        blocks = outer // before
        if (shape[dim] // blocks) % cut.axis.count == 0:
            local = list(shape)
            local[dim] //= cut.axis.count
            return cut.like(cut.local.reshape(local), dim, blocks)
    raise NoRule(f"its view as {tuple(shape)} cannot be cut into {cut.axis.count}")


@rule("view", "reshape", "_unsafe_view")
def _view(_func: Func, args: Args, kwargs: Kwargs) -> Any:
    sizes: Any = kwargs.get("shape", kwargs.get("size", args[1:]))
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    if not all(isinstance(size, int) for size in sizes):
        raise NoRule("it is viewed as another dtype")
    return reshaped(args[0], list(sizes))


@rule("view_as", "reshape_as")
def _view_as(_func: Func, args: Args, _kwargs: Kwargs) -> Any:
    return reshaped(args[0], list(args[1].shape))


@rule("flatten", "unflatten", "unsqueeze", "squeeze")
def _reshaping(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    shaped = torch.empty(cut.shape, device="meta")
    return reshaped(cut, list(func(shaped, *args[1:], **kwargs).shape))


@rule("transpose", "swapaxes", "swapdims")
def _transpose(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    if kwargs:
        return _reordering(func, args, kwargs)
    one, other = args[1] % cut.ndim, args[2] % cut.ndim
    dim = {one: other, other: one}.get(cut.cut_dim, cut.cut_dim)
    return cut.like(cut.local.transpose(one, other), dim)


@rule("permute", "movedim", "moveaxis", "T", "mT", "t")
def _reordering(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    # The sizes of this one are the numbers of its dimensions, so we see where each goes.
    numbers = torch.empty(tuple(range(cut.ndim)), device="meta")
    dims = list(func(numbers, *args[1:], **kwargs).shape)
    return cut.like(func(cut.local, *args[1:], **kwargs), dims.index(cut.cut_dim))


@rule("expand", "broadcast_to")
def _expand(_func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    sizes = kwargs.get("size", args[1:])
    sizes = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes)
    c = from_end(cut)
    sizes[c] = cut.local.shape[c]
    return cut.like(cut.local.expand(sizes), len(sizes) + c)


@rule("repeat_interleave")
def _repeat_interleave(_func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(repeats, int) or dim is None:
        raise NoRule("repeat_interleave by a tensor needs all of it")
    return cut.like(cut.local.repeat_interleave(repeats, dim=dim), cut.cut_dim)


# -- taking apart and putting together ------------------------------------------------------------


@rule("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def _split(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % cut.ndim
    if dim != cut.cut_dim:
        return tuple(cut.like(p, cut.cut_dim) for p in func(cut.local, *args[1:], **kwargs))
    shaped = torch.empty(cut.shape, device="meta")
    sizes = [piece.shape[dim] for piece in func(shaped, *args[1:], **kwargs)]
    block = cut.shape[dim] // cut.blocks
    if any(size % block for size in sizes):
        raise NoRule(f"it is split into {sizes}, across its pieces")
    local = [size // cut.axis.count for size in sizes]
    pieces = zip(cut.local.split(local, dim), sizes, strict=True)
    return tuple(cut.like(piece, dim, size // block) for piece, size in pieces)


@rule("unbind", "select", "narrow", "__iter__")
def _take(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % cut.ndim
    if dim == cut.cut_dim:
        raise NoRule(f"{func.__name__} takes it apart across its pieces")
    if func.__name__ == "narrow":
        return cut.like(func(cut.local, *args[1:], **kwargs), cut.cut_dim)
    new_dim = cut.cut_dim - (dim < cut.cut_dim)
    if func.__name__ == "select":
        return cut.like(func(cut.local, *args[1:], **kwargs), new_dim)
    pieces = tuple(cut.like(piece, new_dim) for piece in cut.local.unbind(dim))
    return iter(pieces) if func.__name__ == "__iter__" else pieces


@rule("__getitem__")
def _getitem(_func: Func, args: Args, _kwargs: Kwargs) -> Any:
    cut, index = args
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, Tensor) for item in items):
        return _masked(cut, items)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        used = sum(item is not None and item is not Ellipsis for item in items)
        items[at : at + 1] = [slice(None)] * (cut.ndim - used)
    source = result = 0
    new_dim = None
    for place, item in enumerate(items):
        if item is None:
            result += 1
            continue
        if source == cut.cut_dim:
            new_dim = result
            items[place], blocks = _slice_blocks(cut, item)
        source, result = source + 1, result + (not isinstance(item, int))
    if new_dim is None:
        new_dim, blocks = result + cut.cut_dim - source, cut.blocks
    return cut.like(cut.local[tuple(items)], new_dim, blocks)


def _slice_blocks(cut: CutTensor, item: Any) -> tuple[slice, int]:
    """Return the local slice of the cut dimension, if it is one of whole blocks."""
    if not isinstance(item, slice):
        raise NoRule("it is indexed across its pieces")
    length = cut.shape[cut.cut_dim]
    start, stop, step = item.indices(length)
    block = length // cut.blocks
    if step != 1 or start % block or stop % block or stop <= start:
        raise NoRule(f"its elements {start} to {stop} of {length} are taken, across its pieces")
    return slice(start // cut.axis.count, stop // cut.axis.count), (stop - start) // block


def _masked(cut: CutTensor, items: list[Any]) -> CutTensor:
    """Index the first dimensions by one tensor."""
    index = items[0]
    used = index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1
    if len(items) > 1 or isinstance(index, CutTensor) or used > cut.cut_dim:
        raise NoRule("it is indexed by a tensor")
    local = cut.local[index]
    return cut.like(local, local.ndim + from_end(cut))


@rule("cat", "concat", "concatenate", "stack")
def _join(func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    if not all(isinstance(tensor, CutTensor) for tensor in tensors):
        raise NoRule(f"{func.__name__} joins it with a whole tensor")
    first, _ = agreed(tensors)
    stacks = func.__name__ == "stack"
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (first.ndim + stacks)
    locals_ = [tensor.local for tensor in tensors]
    if not stacks and dim == first.cut_dim:
        if any(tensor.blocks != 1 for tensor in tensors):
            raise NoRule("it is joined across its pieces")
        same = len({tensor.shape[dim] for tensor in tensors}) == 1
        if not same:
            raise NoRule("it is joined across its pieces")
        return first.like(func(locals_, dim), dim, len(tensors))
    return first.like(func(locals_, dim), first.cut_dim + (stacks and dim <= first.cut_dim))
