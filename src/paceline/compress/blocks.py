"""Tensors as payloads of blocks: fewer bits of every number.

A flat tensor of float32 becomes blocks of a fixed number of values and bytes, one behind the other
(cpp/paceline/codec/format.h), so that a payload may be cut at any block's border. The same bits
come out for any number of threads, and wherever a tensor is cut as long as `draw` moves along.

A value that is not finite is never turned into a number: in `bf16` and `fp16` it stays what it is,
in the others its whole block becomes NaN. Where that happens, the residual stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline import _core
from paceline.compress.kernels import Draw, in_slices, require, require_residual
from paceline.errors import UsageError


@dataclass(frozen=True)
class BlockFormat:
    """How many values a block has, and in how many bytes."""

    name: str
    code: int
    values: int
    num_bytes: int

    @property
    def is_random(self) -> bool:
        """Whether it rounds at random."""
        return self.name == "int4"

    def num_blocks(self, count: int) -> int:
        """Return how many blocks so many values take."""
        return -(-count // self.values)

    def payload_bytes(self, count: int) -> int:
        """Return how many bytes so many values take."""
        return self.num_blocks(count) * self.num_bytes


FORMATS = {
    name: BlockFormat(name, code, values, num_bytes)
    for code, (name, values, num_bytes) in enumerate(_core.BLOCK_FORMATS)
}


def format_named(name: str) -> BlockFormat:
    """Return the format of that name."""
    if name not in FORMATS:
        raise UsageError(f"there is no block format {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def payload_bytes(format: str, count: int) -> int:
    """Return how many bytes so many values take."""
    return format_named(format).payload_bytes(count)


def encode(
    format: str,
    values: torch.Tensor,
    payload: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    draw: Draw | None = None,
    threads: int = 1,
) -> None:
    """Write v = values + residual to `payload`; let `residual` be v less what that decodes to."""
    kind, count = format_named(format), values.numel()
    require("values", values, torch.float32)
    require("payload", payload, torch.uint8, kind.payload_bytes(count))
    left, drawn = require_residual(residual, count), _draw_for(kind, draw)

    def run(begin: int, end: int) -> None:
        _core.encode_blocks(
            kind.code,
            values.data_ptr() + 4 * begin,
            left and left + 4 * begin,
            end - begin,
            drawn.at(begin).parts,
            payload.data_ptr() + kind.payload_bytes(begin),
        )

    in_slices(count, kind.values, threads, run)


def mean(format: str, rows: Sequence[torch.Tensor], out: torch.Tensor, *, threads: int = 1) -> None:
    """Let `out` be the mean of the payloads: added in their order, divided once.

    One row is simply decoded.
    """
    kind, count = format_named(format), out.numel()
    require("out", out, torch.float32)
    addresses = _addresses(kind, rows, count)

    def run(begin: int, end: int) -> None:
        offset = kind.payload_bytes(begin)
        found = [address + offset for address in addresses]
        _core.mean_of_blocks(kind.code, found, end - begin, out.data_ptr() + 4 * begin)

    in_slices(count, kind.values, threads, run)


def recode(
    format: str,
    rows: Sequence[torch.Tensor],
    payload: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    count: int | None = None,
    draw: Draw | None = None,
    threads: int = 1,
) -> None:
    """Write the mean of the payloads `rows`, of `count` values each, to `payload`.

    `residual` grows by the number of rows times what the mean has lost, so that it can be added to
    one of the next rows; `count` is needed only without it. `payload` may be one of the rows.
    """
    kind = format_named(format)
    if count is None:
        if residual is None:
            raise UsageError("recode: without a residual, say how many values a row has (count)")
        count = residual.numel()
    addresses = _addresses(kind, rows, count)
    require("payload", payload, torch.uint8, kind.payload_bytes(count))
    left, drawn = require_residual(residual, count), _draw_for(kind, draw)

    def run(begin: int, end: int) -> None:
        offset = kind.payload_bytes(begin)
        _core.recode_blocks(
            kind.code,
            [address + offset for address in addresses],
            left and left + 4 * begin,
            end - begin,
            drawn.at(begin).parts,
            payload.data_ptr() + offset,
        )

    in_slices(count, kind.values, threads, run)


def _addresses(kind: BlockFormat, rows: Sequence[torch.Tensor], count: int) -> list[int]:
    if not rows:
        raise UsageError(f"{kind.name}: there are no rows to take the mean of")
    for number, row in enumerate(rows):
        require(f"row {number}", row, torch.uint8, kind.payload_bytes(count))
    return [row.data_ptr() for row in rows]


def _draw_for(kind: BlockFormat, draw: Draw | None) -> Draw:
    if draw is None and kind.is_random:
        raise UsageError(f"{kind.name} rounds at random: say with which draw (seed, step, first)")
    return draw or Draw(0, 0)
