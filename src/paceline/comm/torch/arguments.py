"""torch.distributed's arguments in the engine's terms: memory, counts, codes.

torch passes one tensor or a list, options or single values, splits or none, depending on who calls;
here each becomes what `_core.Group` takes. Complex numbers and dtypes that the engine does not know
travel as numbers of the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline import _core
from paceline.comm.tensors import FLOATING, Buffer
from paceline.errors import UnsupportedTensor, UsageError

_KINDS = {name: code for code, name in enumerate(_core.KINDS)}
_OPS: dict[Any, int] = {
    getattr(ReduceOp.RedOpType, theirs): _core.OPS.index(ours)
    for theirs, ours in {
        "SUM": "sum",
        "AVG": "mean",
        "MIN": "min",
        "MAX": "max",
        "PRODUCT": "product",
        "BAND": "band",
        "BOR": "bor",
        "BXOR": "bxor",
    }.items()
}
_MEAN = _core.OPS.index("mean")
_BITWISE = frozenset(_core.OPS.index(name) for name in ("band", "bor", "bxor"))
_ITEM_BYTES = [getattr(torch, name).itemsize for name in _core.DTYPES]
_NATIVE = frozenset(getattr(torch, name) for name in _core.DTYPES)


@dataclass(frozen=True)
class Request:
    """One collective for the engine, and the memory that it works on."""

    arguments: tuple[int, int, int, int, _core.Parts, _core.Parts, Sequence[int]]
    sources: Sequence[Buffer]
    targets: Sequence[Buffer]
    results: list[Tensor]  # what torch sees of the targets


def request(
    kind: str,
    sources: Sequence[Buffer],
    targets: Sequence[Buffer],
    results: list[Tensor],
    *,
    op: int = 0,
    root: int = 0,
    inputs: _core.Parts | None = None,
    outputs: _core.Parts | None = None,
) -> Request:
    """Describe a collective; `inputs` and `outputs` where one buffer has a part for each rank."""
    first = sources[0] if sources else targets[0] if targets else None
    dtype, shape = (first.dtype, first.shape) if first is not None else (0, ())
    for buffer in (*sources, *targets):
        if buffer.dtype != dtype:
            raise UsageError(
                f"{kind}: tensors of {_core.DTYPES[dtype]} and {_core.DTYPES[buffer.dtype]} in one"
                " call; convert them to one dtype"
            )
    given = [buffer.part for buffer in sources] if inputs is None else inputs
    taken = [buffer.part for buffer in targets] if outputs is None else outputs
    arguments = (_KINDS[kind], dtype, op, root, given, taken, shape)
    return Request(arguments, sources, targets, results)


def listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def with_op(opts: Any, op: Any, kind: Any) -> Any:
    """Return torch's options, also where the caller passed only the reduction."""
    if opts is not None and hasattr(opts, "asyncOp"):
        return opts
    chosen = kind()
    if op is not None or opts is not None:
        chosen.reduceOp = opts if op is None else op
    return chosen


def with_root(opts: Any, named: dict[str, Any], kind: Any) -> Any:
    """Return torch's options, also where the caller passed only the root."""
    if opts is not None and hasattr(opts, "asyncOp"):
        return opts
    chosen = kind()
    root = named.get("root", opts)
    if root is not None:
        chosen.rootRank = root
    return chosen


def numbers_of(tensor: Tensor) -> Buffer:
    """Return a tensor's memory for a reduction: complex numbers are added part by part."""
    return Buffer(torch.view_as_real(tensor) if tensor.is_complex() else tensor)


def bytes_of(tensor: Tensor) -> Buffer:
    """Return a tensor's memory to be moved; what it means does not matter."""
    if tensor.dtype in _NATIVE:
        return Buffer(tensor)
    if tensor.is_complex():
        return Buffer(torch.view_as_real(tensor))
    return Buffer(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor)


def op_code(op: Any, dtype: int) -> int:
    """Return the engine's number of a reduction, if it makes sense for the dtype."""
    code = _OPS.get(op.op)
    if code is None:
        raise UsageError(
            f"reduction {op.op}: choose SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR"
        )
    if code == _MEAN and dtype not in FLOATING:
        raise UnsupportedTensor(
            f"AVG of {_core.DTYPES[dtype]} would not be an integer; use SUM and divide"
        )
    if code in _BITWISE and dtype in FLOATING:
        raise UnsupportedTensor(f"{op.op} works on integers and bool, not on {_core.DTYPES[dtype]}")
    return code


def cut_to(large: Buffer, small: Buffer, num_parts: int, kind: str) -> _core.Parts:
    """Cut one buffer into parts of the size of the other."""
    if large.count != small.count * num_parts:
        raise UsageError(
            f"{kind}: tensors of {list(large.shape)} and {list(small.shape)} in a group of"
            f" {num_parts}; the first must have {num_parts} times as many elements"
        )
    return cut(large, num_parts)


def cut(buffer: Buffer, num_parts: int) -> _core.Parts:
    """Cut contiguous memory into equal parts."""
    count = buffer.count // num_parts
    step = count * _ITEM_BYTES[buffer.dtype]
    return [(buffer.address + i * step, count) for i in range(num_parts)]


def cut_rows(buffer: Buffer, tensor: Tensor, rows: Sequence[int], num_parts: int) -> _core.Parts:
    """Cut contiguous memory along the first dimension: `rows` for each rank, or evenly."""
    total = tensor.shape[0] if tensor.dim() else 0
    if not rows:
        if total % num_parts:
            raise UsageError(
                f"all_to_all_single: {total} rows cannot be cut into {num_parts} equal parts; pass"
                " the split sizes"
            )
        return cut(buffer, num_parts)
    if len(rows) != num_parts or sum(rows) != total:
        raise UsageError(
            f"all_to_all_single: split sizes {list(rows)} for {total} rows and {num_parts} ranks;"
            " pass one size for each rank, which add up to the rows"
        )
    row = buffer.count // total if total else 0
    parts, address = [], buffer.address
    for count in rows:
        parts.append((address, count * row))
        address += count * row * _ITEM_BYTES[buffer.dtype]
    return parts
