"""Rules: what operations do with shards (see sharded_tensor.py). Names are those of torch
functions.

Operands are aligned from the right, as in broadcasting: `c` is the sharded dimension counted from
the end. A full operand that needs a gradient enters the region: each process has only its shard's
contribution to that gradient.

Random numbers for shards differ between the processes, and are reproducible. All processes of the
tp axis have equal global generators, so full tensors get the same dropout mask on all of them. For
an operation on shards each process draws one number from the generator (the generators stay equal),
seeds with it and its own index, and restores the state. This happens within one operation, so a
recomputed region (activation checkpointing), which starts from the saved state, draws the same
masks again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.comm.devices import CPU, random_state_of, set_random_state_of
from paceline.model_parallel.tensor.sharded_tensor import (
    RULES,
    NoRule,
    Rule,
    ShardedTensor,
    is_in_place,
    map_tensors,
    sharded_in,
)

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for functions of these names."""

    def register(made: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, made))
        return made

    return register


def from_end(x: ShardedTensor) -> int:
    """Return the sharded dimension counted from the end: -1 is the last."""
    return x.shard_dim - x.ndim


def common_layout(sharded_operands: list[ShardedTensor]) -> tuple[ShardedTensor, int]:
    """Return the first tensor with the origins of all, and the sharded dimension from the end;
    NoRule if the tensors are not sharded in the same way."""
    first = sharded_operands[0]
    for other in sharded_operands[1:]:
        same = from_end(other) == from_end(first) and other.blocks == first.blocks
        if not same or other.shape[other.shard_dim] != first.shape[first.shard_dim]:
            raise NoRule("it combines tensors that are sharded in different ways")
        if not other.origins <= first.origins:
            origins = first.origins | other.origins
            first = ShardedTensor(first.local, first.shard_dim, first.axis, origins, first.blocks)
    return first, from_end(first)


def localize(tree: Any, first: ShardedTensor, c: int) -> Any:
    """Return the tree with shards: of sharded tensors theirs, of full ones the matching slice."""

    def shard(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor):
            return tensor.local
        if tensor.shape == first.shape and tensor.is_floating_point():
            # It could be sliced, but a residual stream is better kept full.
            raise NoRule("its output is combined with a full tensor of the same shape")
        full = enter_shared(tensor, first)
        if tensor.ndim < -c or tensor.shape[c] == 1:
            return full
        return first.axis.slice(tensor.ndim + c, first.blocks).of(full)

    return map_tensors(tree, shard)


def enter_shared(tensor: Tensor, first: ShardedTensor) -> Tensor:
    """Enter a full operand. `* 1` gives its gradient memory of its own, which all-reduce needs."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    return first.axis.enter(tensor, min(first.origins)) * 1


# Each also with an underscore after it: in place.
_ELEMENTWISE = """
add sub mul div true_divide floor_divide remainder fmod pow float_power maximum minimum fmax fmin
rsub neg negative abs absolute exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal
sigmoid tanh sin cos tan asin acos atan atan2 sinh cosh erf erfc relu relu6 gelu silu mish elu selu
celu leaky_relu hardtanh hardswish hardsigmoid softplus softsign tanhshrink hardshrink softshrink
logsigmoid threshold clamp clamp_min clamp_max clip sign round floor ceil trunc frac nan_to_num
where masked_fill lerp addcmul addcdiv eq ne lt le gt ge isnan isinf isfinite logical_not
logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or to type type_as float double
half bfloat16 clone contiguous detach zeros_like ones_like full_like empty_like cpu copysign
logaddexp hypot xlogy positive
"""
_OPERATORS = """
add sub mul truediv div floordiv mod pow neg abs eq ne lt le gt ge and or xor invert pos
"""


def _elementwise_names() -> list[str]:
    names = [f"{name}{end}" for name in _ELEMENTWISE.split() for end in ("", "_")]
    return names + [f"__{kind}{n}__" for n in _OPERATORS.split() for kind in ("", "r", "i")]


@rule(*_elementwise_names())
def _elementwise(func: Func, args: Args, kwargs: Kwargs) -> Any:
    sharded_operands = list(sharded_in((args, kwargs)))
    if not all(
        sharded_operands[0].axis.may_combine(sharded_operands[0].origins, other.origins)
        for other in sharded_operands[1:]
    ):
        raise NoRule("its output is combined with that of a layer with another input")
    first, c = common_layout(sharded_operands)
    if is_in_place(func.__name__) and not isinstance(args[0], ShardedTensor):
        raise NoRule("it is written into a full tensor")
    local_args, local_kwargs = localize((args, kwargs), first, c)
    local = func(*local_args, **local_kwargs)
    target = args[0] if args else None
    if isinstance(target, ShardedTensor) and local is target.local:
        target.origins = first.origins
        return target
    return first.like(local, local.ndim + c)


@rule(
    "dropout",
    "dropout_",
    "feature_dropout",
    "alpha_dropout",
    "native_dropout",
    "bernoulli",
    "rand_like",
    "randn_like",
)
def _random(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: ShardedTensor = args[0]
    with per_process_rng(x.axis.index, x.device):
        local = func(x.local, *args[1:], **kwargs)
    return x.like(local, x.shard_dim)


@contextlib.contextmanager
def per_process_rng(index: int, device: torch.device = CPU) -> Iterator[None]:
    """Let random numbers differ between the processes of the axis within the block."""
    number = int(torch.randint(2**62, ()))
    state = random_state_of(device)
    set_random_state_of(device, torch.Generator(device).manual_seed(number + index).get_state())
    try:
        yield
    finally:
        set_random_state_of(device, state)
