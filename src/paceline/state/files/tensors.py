"""Tensors to bytes and back, without copying a whole tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from paceline.errors import UnsupportedTensor
from paceline.state.files import layout, manifest
from paceline.state.files.durable_files import PIECE_BYTES
from paceline.state.files.layout import TensorRecord


def record_of(name: str, tensor: torch.Tensor, path: Path) -> TensorRecord:
    """Return the record of a tensor; raise UnsupportedTensor if a file cannot hold it."""
    manifest.require_tensor_name(name, path)
    dtype = str(tensor.dtype).removeprefix("torch.")
    reason = ""
    if tensor.layout is not torch.strided:
        reason = f"has the layout {tensor.layout}; make it dense first"
    elif tensor.device.type != "cpu":
        reason = f"is on {tensor.device}; take a snapshot on the CPU first"
    elif dtype not in layout.DTYPES or tensor.is_quantized:
        reason = f"has the dtype {dtype}; safetensors files hold {', '.join(layout.DTYPES)}"
    record = TensorRecord(dtype, tuple(tensor.shape))
    if reason := reason or layout.find_fault(record):
        raise UnsupportedTensor(f"checkpoint {path}: tensor {name!r} {reason}")
    return record


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in element order, some MB at a time."""
    tensor = tensor.detach()
    num_bytes = tensor.numel() * tensor.element_size()
    is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if not is_plain and num_bytes > PIECE_BYTES:
        row_bytes = num_bytes // tensor.shape[0]
        rows = max(1, PIECE_BYTES // row_bytes)
        for start in range(0, tensor.shape[0], rows):
            some = tensor[start] if rows == 1 else tensor[start : start + rows]
            yield from pieces(some)
        return
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a tensor of one element may have any stride
    data = flat.view(torch.uint8).numpy().data
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def empty_bytes(count: int) -> torch.Tensor:
    """Allocate memory for a part; its tensors will be views of it."""
    return torch.empty(count, dtype=torch.uint8)


def views(data: torch.Tensor, records: Mapping[str, TensorRecord]) -> dict[str, torch.Tensor]:
    """Return the tensors in the bytes of a part; they share its memory."""
    begin = len(layout.header(records))
    found = {}
    for name, (start, stop) in layout.offsets(records).items():
        record = records[name]
        some = data[begin + start : begin + stop]
        found[name] = some.view(getattr(torch, record.dtype)).view(record.shape)
    return found
