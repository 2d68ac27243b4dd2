"""Rules for operations that mix dimensions: products, attention, norms, reductions, pooling."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from paceline.model_parallel.tensor.rules import (
    Args,
    Func,
    Kwargs,
    agreed,
    enter_shared,
    from_end,
    localize,
    own_randomness,
    rule,
)
from paceline.model_parallel.tensor.sharded_tensor import CutTensor, NoRule, cuts_in


@rule("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm")
def _matmul(func: Func, args: Args, kwargs: Kwargs) -> Any:
    first, c = agreed(list(cuts_in(args)))
    if c > -3:
        raise NoRule("a matrix product sums over its pieces")
    local = func(*localize(args, first, c), **kwargs)
    return first.like(local, local.ndim + c)


@rule("einsum")
def _einsum(func: Func, args: Args, kwargs: Kwargs) -> Any:
    equation: str = args[0].replace(" ", "")
    operands = list(args[1]) if isinstance(args[1], (list, tuple)) else list(args[1:])
    if "->" not in equation or "." in equation:
        raise NoRule("einsum without an explicit result needs all of it")
    inputs, result = equation.split("->")
    words = inputs.split(",")
    cuts = [(w, o) for w, o in zip(words, operands, strict=True) if isinstance(o, CutTensor)]
    letters = {word[cut.cut_dim] for word, cut in cuts}
    letter = min(letters)
    if len(letters) != 1 or letter not in result or any(cut.blocks != 1 for _, cut in cuts):
        raise NoRule("einsum sums over its pieces")
    first = cuts[0][1]
    origins = frozenset().union(*(cut.origins for _, cut in cuts))
    locals_ = []
    for word, operand in zip(words, operands, strict=True):
        if isinstance(operand, CutTensor):
            locals_.append(operand.local)
            continue
        whole = enter_shared(operand, first)
        cuts_it = letter in word
        locals_.append(first.axis.slice(word.index(letter)).of(whole) if cuts_it else whole)
    local = func(equation, *locals_, **kwargs)
    return CutTensor(local, result.index(letter), first.axis, origins)


@rule("scaled_dot_product_attention")
def _attention(_func: Func, args: Args, kwargs: Kwargs) -> Any:
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False))
    named.update(kwargs)
    heads = [named[name] for name in ("query", "key", "value")]
    if not all(isinstance(one, CutTensor) for one in heads):
        raise NoRule("attention mixes it with whole tensors")
    query = heads[0]
    c = from_end(query)
    if c > -3 or any(from_end(one) != c or one.blocks != query.blocks for one in heads):
        raise NoRule("attention needs all of a head")
    origins = frozenset().union(*(one.origins for one in heads))
    first = CutTensor(query.local, query.cut_dim, query.axis, origins, query.blocks)
    mask = named.get("attn_mask")
    if mask is not None:
        named["attn_mask"] = localize(mask, first, c)
    named |= {n: named[n].local for n in ("query", "key", "value")}
    if named.get("dropout_p"):
        with own_randomness(first.axis.index):
            local = F.scaled_dot_product_attention(**named)
    else:
        local = F.scaled_dot_product_attention(**named)
    return first.like(local, first.cut_dim)


@rule("softmax", "log_softmax", "cumsum", "cumprod")
def _along(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(dim, int) or dim % cut.ndim == cut.cut_dim:
        raise NoRule(f"{func.__name__} goes across its pieces")
    return cut.like(func(cut.local, *args[1:], **kwargs), cut.cut_dim)


@rule("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "prod")
def _reduction(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = [dim % cut.ndim for dim in ([given] if isinstance(given, int) else given or ())]
    if not dims or cut.cut_dim in dims:
        raise NoRule(f"{func.__name__} goes across its pieces")
    local = func(cut.local, *args[1:], **kwargs)
    lost = 0 if local.ndim == cut.ndim else sum(dim < cut.cut_dim for dim in dims)
    return cut.like(local, cut.cut_dim - lost)


@rule("layer_norm", "rms_norm")
def _norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if cut.ndim - cut.cut_dim <= len(shape):
        raise NoRule(f"{func.__name__} goes across its pieces")

    def shared(value: Any) -> Any:
        return enter_shared(value, cut) if isinstance(value, Tensor) else value

    others = [shared(value) for value in args[1:]]
    named = {name: shared(value) for name, value in kwargs.items()}
    return cut.like(func(cut.local, *others, **named), cut.cut_dim)


# How many dimensions, from the end, these work on.
_INNER = {
    **{f"{kind}_pool1d": 1 for kind in ("max", "avg", "adaptive_avg", "adaptive_max")},
    **{f"{kind}_pool2d": 2 for kind in ("max", "avg", "adaptive_avg", "adaptive_max")},
    "view_as_complex": 1,
    "view_as_real": 0,
}


@rule(*_INNER, "pad", "interpolate")
def _inner_dims(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    name = func.__name__
    if name == "pad":
        num_dims = len(args[1] if len(args) > 1 else kwargs["pad"]) // 2
    else:
        num_dims = _INNER.get(name, cut.ndim - 2)
    if cut.cut_dim >= cut.ndim - num_dims:
        raise NoRule(f"{name} goes across its pieces")
    return cut.like(func(cut.local, *args[1:], **kwargs), cut.cut_dim)


@rule("glu")
def _glu(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut: CutTensor = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % cut.ndim
    if dim == cut.cut_dim and cut.blocks != 2:
        raise NoRule("glu goes across its pieces")
    return cut.like(func(cut.local, dim), cut.cut_dim, 1)
