"""Rules for shapes: views, permutations, splitting and joining."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.model_parallel.tensor.rules import Args, Func, Kwargs, common_layout, from_end, rule
from paceline.model_parallel.tensor.sharded_tensor import NoRule, ShardedTensor


def reshaped(x: ShardedTensor, shape: list[int]) -> ShardedTensor:
    """Return the sharded tensor in another shape (of the full tensor).

    In memory order the full tensor is `outer` runs, each of which is split among the processes of
    the axis. In the new shape the dimension that begins where those runs begin is the sharded one;
    if it reaches further out, it has several blocks.
    """
    if -1 in shape:
        known = -math.prod(shape)
        shape = [x.numel() // known if size == -1 else size for size in shape]
    outer = math.prod(x.shape[: x.shard_dim]) * x.blocks
    for dim in reversed(range(len(shape))):
        before = math.prod(shape[:dim])
        if before == 0 or outer % before or shape[dim] % (outer // before):
            continue
        blocks = outer // before
        if (shape[dim] // blocks) % x.axis.count == 0:
            local = list(shape)
            local[dim] //= x.axis.count
            return x.like(x.local.reshape(local), dim, blocks)
    raise NoRule(f"its view as {tuple(shape)} cannot be split into {x.axis.count}")


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
    x: ShardedTensor = args[0]
    shaped = torch.empty(x.shape, device="meta")
    return reshaped(x, list(func(shaped, *args[1:], **kwargs).shape))


@rule("transpose", "swapaxes", "swapdims")
def _transpose(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    if kwargs:
        return _reordering(func, args, kwargs)
    one, other = args[1] % x.ndim, args[2] % x.ndim
    dim = {one: other, other: one}.get(x.shard_dim, x.shard_dim)
    return x.like(x.local.transpose(one, other), dim)


@rule("permute", "movedim", "moveaxis", "T", "mT", "t")
def _reordering(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    # Each size is the dimension's number, so the result shows where each dimension goes.
    numbers = torch.empty(tuple(range(x.ndim)), device="meta")
    dims = list(func(numbers, *args[1:], **kwargs).shape)
    return x.like(func(x.local, *args[1:], **kwargs), dims.index(x.shard_dim))


@rule("expand", "broadcast_to")
def _expand(_func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    sizes = kwargs.get("size", args[1:])
    sizes = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes)
    c = from_end(x)
    sizes[c] = x.local.shape[c]
    return x.like(x.local.expand(sizes), len(sizes) + c)


@rule("repeat_interleave")
def _repeat_interleave(_func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(repeats, int) or dim is None:
        raise NoRule("repeat_interleave by a tensor needs all of it")
    return x.like(x.local.repeat_interleave(repeats, dim=dim), x.shard_dim)


# -- splitting and joining -------------------------------------------------------------------------


@rule("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def _split(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.ndim
    if dim != x.shard_dim:
        return tuple(x.like(p, x.shard_dim) for p in func(x.local, *args[1:], **kwargs))
    shaped = torch.empty(x.shape, device="meta")
    sizes = [shard.shape[dim] for shard in func(shaped, *args[1:], **kwargs)]
    block = x.shape[dim] // x.blocks
    if any(size % block for size in sizes):
        raise NoRule(f"it is split into {sizes}, across its shards")
    local = [size // x.axis.count for size in sizes]
    shards = zip(x.local.split(local, dim), sizes, strict=True)
    return tuple(x.like(shard, dim, size // block) for shard, size in shards)


@rule("unbind", "select", "narrow", "__iter__")
def _take(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.ndim
    if dim == x.shard_dim:
        raise NoRule(f"{func.__name__} splits it across its shards")
    if func.__name__ == "narrow":
        return x.like(func(x.local, *args[1:], **kwargs), x.shard_dim)
    new_dim = x.shard_dim - (dim < x.shard_dim)
    if func.__name__ == "select":
        return x.like(func(x.local, *args[1:], **kwargs), new_dim)
    shards = tuple(x.like(shard, new_dim) for shard in x.local.unbind(dim))
    return iter(shards) if func.__name__ == "__iter__" else shards


@rule("__getitem__")
def _getitem(_func: Func, args: Args, _kwargs: Kwargs) -> Any:
    x, index = args
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, Tensor) for item in items):
        return _masked(x, items)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        used = sum(item is not None and item is not Ellipsis for item in items)
        items[at : at + 1] = [slice(None)] * (x.ndim - used)
    source = result = 0
    new_dim = None
    for place, item in enumerate(items):
        if item is None:
            result += 1
            continue
        if source == x.shard_dim:
            new_dim = result
            items[place], blocks = _slice_blocks(x, item)
        source, result = source + 1, result + (not isinstance(item, int))
    if new_dim is None:
        new_dim, blocks = result + x.shard_dim - source, x.blocks
    return x.like(x.local[tuple(items)], new_dim, blocks)


def _slice_blocks(x: ShardedTensor, item: Any) -> tuple[slice, int]:
    """Return the local slice of the sharded dimension, if it consists of entire blocks."""
    if not isinstance(item, slice):
        raise NoRule("it is indexed across its shards")
    length = x.shape[x.shard_dim]
    start, stop, step = item.indices(length)
    block = length // x.blocks
    if step != 1 or start % block or stop % block or stop <= start:
        raise NoRule(f"its elements {start} to {stop} of {length} are taken, across its shards")
    return slice(start // x.axis.count, stop // x.axis.count), (stop - start) // block


def _masked(x: ShardedTensor, items: list[Any]) -> ShardedTensor:
    """Index the first dimensions by one tensor."""
    index = items[0]
    used = index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1
    if len(items) > 1 or isinstance(index, ShardedTensor) or used > x.shard_dim:
        raise NoRule("it is indexed by a tensor")
    local = x.local[index]
    return x.like(local, local.ndim + from_end(x))


@rule("cat", "concat", "concatenate", "stack")
def _join(func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    if not all(isinstance(tensor, ShardedTensor) for tensor in tensors):
        raise NoRule(f"{func.__name__} joins it with a full tensor")
    first, _ = common_layout(tensors)
    stacks = func.__name__ == "stack"
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (first.ndim + stacks)
    locals_ = [tensor.local for tensor in tensors]
    if not stacks and dim == first.shard_dim:
        if any(tensor.blocks != 1 for tensor in tensors):
            raise NoRule("it is joined across its shards")
        same = len({tensor.shape[dim] for tensor in tensors}) == 1
        if not same:
            raise NoRule("it is joined across its shards")
        return first.like(func(locals_, dim), dim, len(tensors))
    return first.like(func(locals_, dim), first.shard_dim + (stacks and dim <= first.shard_dim))
