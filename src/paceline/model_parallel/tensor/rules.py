"""Rules: what operations do with pieces (see sharded_tensor.py). Names are those of torch
functions.

Operands are aligned from the right, as broadcasting does it: `c` is the cut dimension counted from
the end. A whole operand that needs a gradient enters the region: each process has only its pieces'
share of that gradient.

Random numbers for pieces differ on every process, and are reproducible. All processes of the tp
axis have equal global generators, so whole tensors get the same dropout mask everywhere. For an
operation on pieces each process draws one number from the generator (the generators stay equal),
seeds with it and its own index, and puts the state back. It happens within one operation, so a
recomputed region (activation checkpointing), which starts from the kept state, draws the same
masks again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.model_parallel.tensor.sharded_tensor import (
    RULES,
    CutTensor,
    NoRule,
    Rule,
    cuts_in,
    is_in_place,
    mapped,
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


def from_end(cut: CutTensor) -> int:
    """Return the cut dimension counted from the end: -1 is the last."""
    return cut.cut_dim - cut.ndim


def agreed(cuts: list[CutTensor]) -> tuple[CutTensor, int]:
    """Return the first, with merged origins, and the cut dimension from the end."""
    first = cuts[0]
    for other in cuts[1:]:
        same = from_end(other) == from_end(first) and other.blocks == first.blocks
        if not same or other.shape[other.cut_dim] != first.shape[first.cut_dim]:
            raise NoRule("two tensors that are cut in different ways meet in it")
        if not other.origins <= first.origins:
            origins = first.origins | other.origins
            first = CutTensor(first.local, first.cut_dim, first.axis, origins, first.blocks)
    return first, from_end(first)


def localize(tree: Any, first: CutTensor, c: int) -> Any:
    """Return the tree with pieces: of cut tensors theirs, of whole ones what belongs to them."""

    def piece(tensor: Tensor) -> Tensor:
        if isinstance(tensor, CutTensor):
            return tensor.local
        if tensor.shape == first.shape and tensor.is_floating_point():
            # It could be cut, but a stream of residuals is better kept whole.
            raise NoRule("its output meets a whole tensor of the same shape")
        whole = enter_shared(tensor, first)
        if tensor.ndim < -c or tensor.shape[c] == 1:
            return whole
        return first.axis.slice(tensor.ndim + c, first.blocks).of(whole)

    return mapped(tree, piece)


def enter_shared(tensor: Tensor, first: CutTensor) -> Tensor:
    """Enter a whole operand; its gradient may be shared with another's, so it gets its own."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    return first.axis.enter(tensor, min(first.origins)) * 1


# Each also with an underscore behind it: in place.
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
    cuts = list(cuts_in((args, kwargs)))
    if not all(cuts[0].axis.may_meet(cuts[0].origins, other.origins) for other in cuts[1:]):
        raise NoRule("its output meets that of a layer with another input")
    first, c = agreed(cuts)
    if is_in_place(func.__name__) and not isinstance(args[0], CutTensor):
        raise NoRule("it is written into a tensor that all processes hold whole")
    local_args, local_kwargs = localize((args, kwargs), first, c)
    local = func(*local_args, **local_kwargs)
    target = args[0] if args else None
    if isinstance(target, CutTensor) and local is target.local:
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
    cut: CutTensor = args[0]
    with own_randomness(cut.axis.index):
        local = func(cut.local, *args[1:], **kwargs)
    return cut.like(local, cut.cut_dim)


@contextlib.contextmanager
def own_randomness(index: int) -> Iterator[None]:
    """Let random numbers differ between the processes of the axis while in the block."""
    generator = torch.default_generator
    number = int(torch.randint(2**62, ()))
    state = generator.get_state()
    generator.manual_seed(number + index)
    try:
        yield
    finally:
        generator.set_state(state)
