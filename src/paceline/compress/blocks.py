"""Block formats: tensors as payloads with fewer bits per number.

A flat float32 tensor becomes consecutive blocks of a fixed number of values and bytes
(cpp/paceline/codec/format.h), so a payload can be split at any block boundary. The result is the
same for any number of threads, and wherever a tensor is split, as long as `draw` advances with the
offset.

A value that is not finite never becomes a finite number: `bf16` and `fp16` keep it, in the other
formats its whole block becomes NaN. In that case the residual does not change.
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
    """The number of values and bytes of a block."""

    name: str
    code: int
    values: int
    num_bytes: int

    @property
    def is_random(self) -> bool:
        """Whether encoding rounds at random."""
        return self.name == "int4"

    def num_blocks(self, count: int) -> int:
        """Return the number of blocks of this many values; the last one may not be full."""
        return -(-count // self.values)

    def payload_bytes(self, count: int) -> int:
        """Return the size of the payload of this many values."""
        return self.num_blocks(count) * self.num_bytes


FORMATS = {
    name: BlockFormat(name, code, values, num_bytes)
    for code, (name, values, num_bytes) in enumerate(_core.BLOCK_FORMATS)
}


def find_format(name: str) -> BlockFormat:
    """Return the format with this name."""
    if name not in FORMATS:
        raise UsageError(f"unknown block format {name!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def payload_bytes(format: str, count: int) -> int:
    """Return the size of the payload of this many values."""
    return find_format(format).payload_bytes(count)


def encode(
    format: str,
    values: torch.Tensor,
    payload: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    draw: Draw | None = None,
    threads: int = 1,
) -> None:
    """Write v = values + residual to `payload`; set `residual` to v - decoded payload."""
    kind, count = find_format(format), values.numel()
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
    """Write the mean of the payloads to `out`: added in their order, divided once.

    The mean of one row is its decoded values.
    """
    kind, count = find_format(format), out.numel()
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

    The rounding error of the mean, times the number of rows, is added to `residual`, so that it can
    be added to one of the next rows. `count` is needed only without a residual. `payload` may be
    one of the rows.
    """
    kind = find_format(format)
    if count is None:
        if residual is None:
            raise UsageError("recode: without a residual, pass `count`, the values of a row")
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
        raise UsageError(f"{kind.name}: there are no rows to average")
    for number, row in enumerate(rows):
        require(f"row {number}", row, torch.uint8, kind.payload_bytes(count))
    return [row.data_ptr() for row in rows]


def _draw_for(kind: BlockFormat, draw: Draw | None) -> Draw:
    if draw is None and kind.is_random:
        raise UsageError(f"{kind.name} rounds at random: pass `draw` (seed, step, first)")
    return draw or Draw(0, 0)


# -- int8 with scales that all workers share -------------------------------------------------------

SHARED_VALUES = 256  # in a block


def num_shared_blocks(count: int) -> int:
    """Return the number of blocks of this many values."""
    return -(-count // SHARED_VALUES)


def levels_for(workers: int) -> int:
    """Return the levels on each side of zero for which the sum of all workers fits a byte."""
    if not 1 <= workers <= 127:
        raise UsageError(
            f"int8 with scales=shared supports 1 to 127 workers, not {workers}; use plain int8"
        )
    return 127 // workers


def block_absmax(
    values: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    *,
    threads: int = 1,
) -> None:
    """Write the largest |values + residual| of each block to `out`; NaN if not finite."""
    count = values.numel()
    require("values", values, torch.float32)
    require("out", out, torch.float32, num_shared_blocks(count))
    left = require_residual(residual, count)

    def run(begin: int, end: int) -> None:
        _core.block_largest(
            values.data_ptr() + 4 * begin,
            left and left + 4 * begin,
            end - begin,
            out.data_ptr() + 4 * (begin // SHARED_VALUES),
        )

    in_slices(count, SHARED_VALUES, threads, run)


def encode_shared(
    values: torch.Tensor,
    absmax: torch.Tensor,
    levels: int,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    threads: int = 1,
) -> None:
    """Write v / absmax * levels to `out` (int8), with v = values + residual; the rounding error
    becomes the residual."""
    count = values.numel()
    require("values", values, torch.float32)
    require("out", out, torch.int8, count)
    require("absmax", absmax, torch.float32, num_shared_blocks(count))
    _require_levels(levels)
    left = require_residual(residual, count)

    def run(begin: int, end: int) -> None:
        _core.encode_shared(
            values.data_ptr() + 4 * begin,
            left and left + 4 * begin,
            end - begin,
            absmax.data_ptr() + 4 * (begin // SHARED_VALUES),
            levels,
            out.data_ptr() + begin,
        )

    in_slices(count, SHARED_VALUES, threads, run)


def decode_shared(
    total: torch.Tensor,
    absmax: torch.Tensor,
    levels: int,
    workers: int,
    out: torch.Tensor,
    *,
    threads: int = 1,
) -> None:
    """Write the workers' mean to `out`, from the sum of their bytes."""
    count = out.numel()
    require("out", out, torch.float32)
    require("total", total, torch.int8, count)
    require("absmax", absmax, torch.float32, num_shared_blocks(count))
    _require_levels(levels)
    if workers < 1 or workers * levels > 127:
        raise UsageError(
            f"the sum of {workers} workers with {levels} levels does not fit into a byte;"
            " use levels_for(workers)"
        )

    def run(begin: int, end: int) -> None:
        _core.decode_shared(
            total.data_ptr() + begin,
            end - begin,
            absmax.data_ptr() + 4 * (begin // SHARED_VALUES),
            levels,
            workers,
            out.data_ptr() + 4 * begin,
        )

    in_slices(count, SHARED_VALUES, threads, run)


def _require_levels(levels: int) -> None:
    if not 1 <= levels <= 127:
        raise UsageError(f"levels: expected 1 to 127, got {levels}")
