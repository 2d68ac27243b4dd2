"""The bytes of a part: a safetensors file with exactly one form for given tensors.

A safetensors file is a length (8 bytes), a header in JSON (dtype, shape and offsets of each tensor)
and the tensors' bytes. Here the header follows from the tensors' dtypes and shapes: tensors lie in
order without gaps, and padding puts the first at a multiple of 64. So a reader does not parse a
header: it knows the only valid one, and overlapping, negative or outlying offsets cannot occur.
Wide dtypes come first, so that each tensor is aligned.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from paceline.errors import CheckpointError

# By torch's name: the name in safetensors files, and bytes per element.
DTYPES = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "complex64": ("C64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}
MAX_DIMS = 64
_ALIGNMENT = 64
_MAX_HEADER = 100_000_000  # safetensors refuses longer ones

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dtype and shape of a tensor."""

    dtype: str  # as torch calls it: "float32"
    shape: tuple[Size, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def find_fault(record: TensorRecord) -> str:
    """Return why this cannot be a tensor of torch; "" if it can."""
    if record.dtype not in DTYPES:
        return f"has the unknown dtype {record.dtype!r}"
    if len(record.shape) > MAX_DIMS:
        return f"has {len(record.shape)} dimensions, expected up to {MAX_DIMS}"
    # Zeros count as 1: torch computes strides as 64-bit numbers.
    if math.prod(max(size, 1) for size in record.shape) * DTYPES[record.dtype][1] >= 1 << 62:
        return f"has a shape whose product overflows: {record.shape}"
    return ""


def in_order(tensors: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
    """Return the tensors with wide dtypes first."""
    return dict(sorted(tensors.items(), key=lambda item: -DTYPES[item[1].dtype][1]))


def offsets(tensors: Mapping[str, TensorRecord]) -> dict[str, tuple[int, int]]:
    """Return start and stop of each tensor after the header."""
    found, at = {}, 0
    for name, record in tensors.items():
        found[name] = (at, at + record.num_bytes)
        at = found[name][1]
    return found


def header(tensors: Mapping[str, TensorRecord]) -> bytes:
    """Return the bytes before the tensors: length and header."""
    where = offsets(tensors)
    entries = {
        name: {
            "dtype": DTYPES[record.dtype][0],
            "shape": record.shape,
            "data_offsets": where[name],
        }
        for name, record in tensors.items()
    }
    text = msgspec.json.encode(entries)
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > _MAX_HEADER:
        raise CheckpointError(
            f"{len(tensors)} tensors need a header of {len(text)} bytes in one safetensors file,"
            f" which may have {_MAX_HEADER}; split them over more parts"
        )
    return struct.pack("<Q", len(text)) + text


def size_bytes(tensors: Mapping[str, TensorRecord]) -> int:
    """Return the size of the file of these tensors."""
    return len(header(tensors)) + sum(record.num_bytes for record in tensors.values())
