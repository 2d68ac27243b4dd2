"""Signs of tensors as bits, 64 in an int64 word, and the majority of several rows of them.

The kernels are in the engine (cpp/paceline/reduce/bits.h); this module calls them with tensors. An
element that is zero or not finite has no sign and takes a bit of the coin, a Draw: workers with the
same draw get the same bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline import _core
from paceline.compress.kernels import Draw, require
from paceline.errors import UsageError

_CODES = {
    dtype: _core.DTYPES.index(str(dtype).removeprefix("torch."))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}
SIGNS_IN_WORD = 64


def num_words(signs: int) -> int:
    """Return the number of words that hold this many signs."""
    return -(-signs // SIGNS_IN_WORD)


def pack_signs(values: torch.Tensor, coin: Draw, bits: torch.Tensor) -> None:
    """Write the signs of a flat tensor of float32 or float64 to `bits`."""
    require("values", values, values.dtype)
    require("bits", bits, torch.int64)
    where, code = bits.data_ptr(), _code(values)
    _core.pack_signs(values.data_ptr(), values.numel(), code, coin.parts, where, bits.numel())


@dataclass(frozen=True)
class Momentum:
    """An exponential moving average of the values so far."""

    values: torch.Tensor
    keep: float  # weight of the old average


def pack_tracked(values: torch.Tensor, momentum: Momentum, coin: Draw, bits: torch.Tensor) -> None:
    """Set the momentum to keep * momentum + (1 - keep) * values; write its signs to `bits`.

    Values that are not finite count as 0.
    """
    require("values", values, values.dtype)
    require("momentum", momentum.values, values.dtype, values.numel())
    require("bits", bits, torch.int64)
    _core.pack_tracked(
        values.data_ptr(),
        momentum.values.data_ptr(),
        momentum.keep,
        values.numel(),
        _code(values),
        coin.parts,
        bits.data_ptr(),
        bits.numel(),
    )


def pack_corrected(
    values: torch.Tensor,
    momentum: Momentum | None,
    voted: torch.Tensor,
    scale: float,
    coin: Draw,
    bits: torch.Tensor,
) -> float:
    """Set `voted` to values + (voted - scale * sign(voted)), and write its signs to `bits`.

    A momentum is updated first and replaces the values. Returns the mean absolute value of the
    elements that have a sign. Values that are not finite count as 0.
    """
    require("values", values, values.dtype)
    if momentum is not None:
        require("momentum", momentum.values, values.dtype, values.numel())
    require("voted", voted, values.dtype, values.numel())
    require("bits", bits, torch.int64)
    total, count = _core.pack_corrected(
        values.data_ptr(),
        0 if momentum is None else momentum.values.data_ptr(),
        0.0 if momentum is None else momentum.keep,
        voted.data_ptr(),
        scale,
        values.numel(),
        _code(values),
        coin.parts,
        bits.data_ptr(),
        bits.numel(),
    )
    return total / count if count else 0.0


def majority(rows: Sequence[torch.Tensor], coin: Draw, bits: torch.Tensor) -> None:
    """Write the majority of the rows to `bits`; a tie takes the bit of the coin."""
    for row in (*rows, bits):
        require("a row of bits", row, torch.int64, bits.numel())
    _core.majority([row.data_ptr() for row in rows], bits.numel(), coin.parts, bits.data_ptr())


def unpack_signs(bits: torch.Tensor, scale: float, values: torch.Tensor) -> None:
    """Write scale or -scale to every element of a flat tensor."""
    require("bits", bits, torch.int64)
    require("values", values, values.dtype)
    where, code = values.data_ptr(), _code(values)
    _core.unpack_signs(bits.data_ptr(), bits.numel(), values.numel(), code, scale, where)


def _code(values: torch.Tensor) -> int:
    if values.dtype not in _CODES:
        raise UsageError(f"expected floating-point values, got {values.dtype}")
    return _CODES[values.dtype]
