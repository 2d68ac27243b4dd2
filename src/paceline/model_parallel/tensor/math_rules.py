"""Rules for operations on several dimensions: products, attention, norms, reductions, pooling."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from paceline.model_parallel.tensor.rules import (
    Args,
    Func,
    Kwargs,
    common_layout,
    enter_shared,
    from_end,
    localize,
    per_process_rng,
    rule,
)
from paceline.model_parallel.tensor.sharded_tensor import NoRule, ShardedTensor, sharded_in


@rule("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm")
def _matmul(func: Func, args: Args, kwargs: Kwargs) -> Any:
    first, c = common_layout(list(sharded_in(args)))
    if c > -3:
        raise NoRule("a matrix product sums over its shards")
    local = func(*localize(args, first, c), **kwargs)
    return first.like(local, local.ndim + c)


@rule("einsum")
def _einsum(func: Func, args: Args, kwargs: Kwargs) -> Any:
    equation: str = args[0].replace(" ", "")
    operands = list(args[1]) if isinstance(args[1], (list, tuple)) else list(args[1:])
    if "->" not in equation or "." in equation:
        raise NoRule("einsum without an explicit result needs all of it")
    inputs, result = equation.split("->")
    subscripts = inputs.split(",")
    sharded_operands = [
        (dims, one)
        for dims, one in zip(subscripts, operands, strict=True)
        if isinstance(one, ShardedTensor)
    ]
    letters = {dims[x.shard_dim] for dims, x in sharded_operands}
    letter = min(letters)
    if len(letters) != 1 or letter not in result or any(x.blocks != 1 for _, x in sharded_operands):
        raise NoRule("einsum sums over its shards")
    first = sharded_operands[0][1]
    origins = frozenset().union(*(x.origins for _, x in sharded_operands))
    locals_ = []
    for dims, operand in zip(subscripts, operands, strict=True):
        if isinstance(operand, ShardedTensor):
            locals_.append(operand.local)
            continue
        full = enter_shared(operand, first)
        is_sliced = letter in dims
        locals_.append(first.axis.slice(dims.index(letter)).of(full) if is_sliced else full)
    local = func(equation, *locals_, **kwargs)
    return ShardedTensor(local, result.index(letter), first.axis, origins)


@rule("scaled_dot_product_attention")
def _attention(_func: Func, args: Args, kwargs: Kwargs) -> Any:
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False))
    named.update(kwargs)
    heads = [named[name] for name in ("query", "key", "value")]
    if not all(isinstance(one, ShardedTensor) for one in heads):
        raise NoRule("attention combines it with full tensors")
    query = heads[0]
    c = from_end(query)
    if c > -3 or any(from_end(one) != c or one.blocks != query.blocks for one in heads):
        raise NoRule("attention needs all of a head")
    origins = frozenset().union(*(one.origins for one in heads))
    first = ShardedTensor(query.local, query.shard_dim, query.axis, origins, query.blocks)
    mask = named.get("attn_mask")
    if mask is not None:
        named["attn_mask"] = localize(mask, first, c)
    named |= {n: named[n].local for n in ("query", "key", "value")}
    if named.get("dropout_p"):
        with per_process_rng(first.axis.index, query.device):
            local = F.scaled_dot_product_attention(**named)
    else:
        local = F.scaled_dot_product_attention(**named)
    return first.like(local, first.shard_dim)


@rule("softmax", "log_softmax", "cumsum", "cumprod")
def _along(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(dim, int) or dim % x.ndim == x.shard_dim:
        raise NoRule(f"{func.__name__} works across its shards")
    return x.like(func(x.local, *args[1:], **kwargs), x.shard_dim)


@rule("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "prod")
def _reduction(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = [dim % x.ndim for dim in ([given] if isinstance(given, int) else given or ())]
    if not dims or x.shard_dim in dims:
        raise NoRule(f"{func.__name__} works across its shards")
    local = func(x.local, *args[1:], **kwargs)
    lost = 0 if local.ndim == x.ndim else sum(dim < x.shard_dim for dim in dims)
    return x.like(local, x.shard_dim - lost)


@rule("layer_norm", "rms_norm")
def _norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if x.ndim - x.shard_dim <= len(shape):
        raise NoRule(f"{func.__name__} works across its shards")

    def shared(value: Any) -> Any:
        return enter_shared(value, x) if isinstance(value, Tensor) else value

    others = [shared(value) for value in args[1:]]
    named = {name: shared(value) for name, value in kwargs.items()}
    return x.like(func(x.local, *others, **named), x.shard_dim)


# How many dimensions, from the end, these work on.
_INNER = {
    **{f"{kind}_pool1d": 1 for kind in ("max", "avg", "adaptive_avg", "adaptive_max")},
    **{f"{kind}_pool2d": 2 for kind in ("max", "avg", "adaptive_avg", "adaptive_max")},
    "view_as_complex": 1,
    "view_as_real": 0,
}


@rule(*_INNER, "pad", "interpolate")
def _inner_dims(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    name = func.__name__
    if name == "pad":
        num_dims = len(args[1] if len(args) > 1 else kwargs["pad"]) // 2
    else:
        num_dims = _INNER.get(name, x.ndim - 2)
    if x.shard_dim >= x.ndim - num_dims:
        raise NoRule(f"{name} works across its shards")
    return x.like(func(x.local, *args[1:], **kwargs), x.shard_dim)


@rule("glu")
def _glu(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % x.ndim
    if dim == x.shard_dim and x.blocks != 2:
        raise NoRule("glu works across its shards")
    return x.like(func(x.local, dim), x.shard_dim, 1)
