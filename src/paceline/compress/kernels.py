"""The kernels of compression, under one name: see the modules that they come from.

Flat, contiguous tensors of the CPU in and out; numbers are float32, payloads uint8, indices int32.
Results do not depend on `threads`, nor on whether the processor has AVX2.
"""

from __future__ import annotations

from paceline.compress.blocks import (
    FORMATS,
    BlockFormat,
    encode,
    format_named,
    mean,
    payload_bytes,
    recode,
)
from paceline.compress.draw import Draw
from paceline.compress.shared import (
    SHARED_VALUES,
    block_absmax,
    decode_shared,
    encode_shared,
    levels_for,
    num_shared_blocks,
)
from paceline.compress.sparse import (
    gap_bytes,
    gap_format,
    pack_gaps,
    random_indices,
    scatter_mean,
    select,
    unpack_gaps,
)

__all__ = [
    "FORMATS",
    "SHARED_VALUES",
    "BlockFormat",
    "Draw",
    "block_absmax",
    "decode_shared",
    "encode",
    "encode_shared",
    "format_named",
    "gap_bytes",
    "gap_format",
    "levels_for",
    "mean",
    "num_shared_blocks",
    "pack_gaps",
    "payload_bytes",
    "random_indices",
    "recode",
    "scatter_mean",
    "select",
    "unpack_gaps",
]
