"""Conversion of torch.distributed's arguments to those of `_core.Group`: memory, counts, codes.

Depending on the caller, torch passes one tensor or a list, options or single values, splits or
none. Complex numbers, and dtypes that the engine does not support, are sent as numbers with the
same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline import _core
from paceline.comm.tensors import Buffer, common_dtype, require_supported
from paceline.errors import UsageError

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

_ITEM_BYTES = [getattr(torch, name).itemsize for name in _core.DTYPES]
_NATIVE = frozenset(getattr(torch, name) for name in _core.DTYPES)


@dataclass(frozen=True)
class CollectiveCall:
    """One collective call into the engine, and the memory that it uses."""

    arguments: tuple[int, int, int, int, _core.Parts, _core.Parts, Sequence[int]]
    sources: Sequence[Buffer]
    targets: Sequence[Buffer]
    results: list[Tensor]  # torch's tensors of the targets


def collective_call(
    kind: str,
    sources: Sequence[Buffer],
    targets: Sequence[Buffer],
    results: list[Tensor],
    *,
    op: int = 0,
    root: int = 0,
    inputs: _core.Parts | None = None,
    outputs: _core.Parts | None = None,
) -> CollectiveCall:
    """Create a call; pass `inputs` or `outputs` if one buffer has the parts of all ranks."""
    dtype, shape = common_dtype(kind, (*sources, *targets))
    inputs = [buffer.part for buffer in sources] if inputs is None else inputs
    outputs = [buffer.part for buffer in targets] if outputs is None else outputs
    arguments = (_KINDS[kind], dtype, op, root, inputs, outputs, shape)
    return CollectiveCall(arguments, sources, targets, results)


def as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def options_with_op(opts: Any, op: Any, kind: Any) -> Any:
    """Return torch's options, also if the caller passed only the reduction."""
    if opts is not None and hasattr(opts, "asyncOp"):
        return opts
    chosen = kind()
    if op is not None or opts is not None:
        chosen.reduceOp = opts if op is None else op
    return chosen


def options_with_root(opts: Any, named: dict[str, Any], kind: Any) -> Any:
    """Return torch's options, also if the caller passed only the root."""
    if opts is not None and hasattr(opts, "asyncOp"):
        return opts
    chosen = kind()
    root = named.get("root", opts)
    if root is not None:
        chosen.rootRank = root
    return chosen


def numeric_buffer(tensor: Tensor) -> Buffer:
    """Return a tensor's memory for a reduction: complex numbers as real and imaginary parts."""
    return Buffer(torch.view_as_real(tensor) if tensor.is_complex() else tensor)


def raw_buffer(tensor: Tensor) -> Buffer:
    """Return a tensor's memory for a copy, in a dtype of the same size that the engine supports."""
    if tensor.dtype in _NATIVE:
        return Buffer(tensor)
    if tensor.is_complex():
        return Buffer(torch.view_as_real(tensor))
    return Buffer(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor)


def known_op(op: Any) -> int | None:
    """Return the engine's number of a reduction, or None if there is none."""
    return _OPS.get(op.op)


def op_code(op: Any, dtype: int) -> int:
    """Return the engine's number of a reduction; raise if the dtype does not support it."""
    code = _OPS.get(op.op)
    if code is None:
        raise UsageError(
            f"reduction {op.op}: choose SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR"
        )
    require_supported(code, dtype, truncates=True)  # as NCCL averages integers
    return code


def split_like(large: Buffer, small: Buffer, num_parts: int, kind: str) -> _core.Parts:
    """Split one buffer into parts of the size of the other."""
    if large.count != small.count * num_parts:
        raise UsageError(
            f"{kind}: tensors of {list(large.shape)} and {list(small.shape)} in a group of"
            f" {num_parts}; the first must have {num_parts} times as many elements"
        )
    return _split_evenly(large, num_parts)


def _split_evenly(buffer: Buffer, num_parts: int) -> _core.Parts:
    count = buffer.count // num_parts
    step = count * _ITEM_BYTES[buffer.dtype]
    return [(buffer.address + i * step, count) for i in range(num_parts)]


def split_buffer(
    buffer: Buffer, tensor: Tensor, rows: Sequence[int], num_parts: int
) -> _core.Parts:
    """Split contiguous memory along the first dimension: `rows` for each rank, or evenly."""
    total = tensor.shape[0] if tensor.dim() else 0
    if not rows:
        if total % num_parts:
            raise UsageError(
                f"all_to_all_single: {total} rows cannot be split into {num_parts} parts; pass"
                " the split sizes"
            )
        return _split_evenly(buffer, num_parts)
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
