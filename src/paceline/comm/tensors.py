"""Tensors and arrays as the engine sees them: an address, a count and a dtype.

Torch tensors and numpy arrays are both accepted. The engine moves contiguous memory: for a strided
tensor it works on a contiguous copy, and a result is copied back into the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from paceline import _core
from paceline.errors import UnsupportedTensor, UsageError

Tensor: TypeAlias = torch.Tensor | np.ndarray

_CODES = {name: code for code, name in enumerate(_core.DTYPES)}
_TORCH_CODES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in _CODES.items()}
_NUMPY_CODES: dict[np.dtype[Any], int] = {
    np.dtype(name): code for name, code in _CODES.items() if name != "bfloat16"
}
FLOATING = frozenset(_CODES[name] for name in ("float32", "float64", "float16", "bfloat16"))

_OPS = {name: code for code, name in enumerate(_core.OPS)}
_OPS["avg"] = _OPS["mean"]
_OPS["prod"] = _OPS["product"]
# Of these types the engine reads most tensors by itself; `Buffer` reads the others.
_core.use_tensor_types(torch.Tensor, torch.nn.Parameter)

_BITWISE = frozenset(_OPS[name] for name in ("band", "bor", "bxor"))


def can_read(tensor: torch.Tensor) -> bool:
    """Return whether the core reads the memory of this tensor by itself."""
    return _core.reads_tensor(tensor)


def dtype_code(tensor: torch.Tensor) -> int:
    """Return the engine's number of a tensor's dtype; raise UnsupportedTensor if it has none."""
    return _torch_code(tensor)


def known_op(op: str) -> int | None:
    """Return the engine's number of a reduction, or None if there is none of that name."""
    return _OPS.get(op)


class Buffer:
    """Contiguous memory of a tensor, or of a contiguous copy of a strided tensor."""

    __slots__ = ("address", "count", "dtype", "shape", "_memory", "_original")

    is_late = False  # whether the memory gets the tensor's values only later

    def __init__(self, tensor: Tensor) -> None:
        self._original: Tensor | None = None
        if isinstance(tensor, torch.Tensor):
            self.dtype = _torch_code(tensor)
            # A negative view keeps its sign outside of its memory.
            if not tensor.is_contiguous() or tensor.is_neg():
                self._original, tensor = tensor, tensor.resolve_neg().contiguous()
            self.address, self.count = tensor.data_ptr(), tensor.numel()
            self.shape: Sequence[int] = tensor.shape
        else:
            self.dtype = _numpy_code(tensor)
            if not tensor.flags.c_contiguous:
                self._original, tensor = tensor, np.ascontiguousarray(tensor)
            self.address, self.count = tensor.ctypes.data, tensor.size
            self.shape = tensor.shape
        self._memory = tensor

    @property
    def part(self) -> tuple[int, int]:
        return self.address, self.count

    @property
    def is_copy(self) -> bool:
        """Whether this is a contiguous copy of a strided tensor."""
        return self._original is not None

    def arrive(self) -> None:
        """Block until the memory has the tensor's values: it has them."""

    def write_back(self) -> None:
        """Copy a result into the strided tensor that this buffer is a copy of."""
        if isinstance(self._original, torch.Tensor):
            with torch.no_grad():
                self._original.copy_(self._memory)  # type: ignore[arg-type]
        elif self._original is not None:
            np.copyto(self._original, self._memory)


def result_buffer(tensor: Tensor) -> Buffer:
    """Return the buffer of a tensor that an operation writes to."""
    if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
        raise UsageError("the array for the result is read-only; pass a writeable one")
    return Buffer(tensor)


def _torch_code(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu":
        raise UnsupportedTensor(
            f"tensor of shape {list(tensor.shape)} is on {tensor.device}; the engine moves CPU"
            " tensors: call .cpu() first, or use an operation of pl.world() or another pl.Group"
        )
    return code_of(tensor)


def code_of(tensor: torch.Tensor) -> int:
    """Return the engine's number of the dtype of a tensor on the CPU or on a device; raise
    UnsupportedTensor if the engine cannot move such a tensor."""
    if tensor.layout is not torch.strided:
        raise UnsupportedTensor(
            f"tensor of shape {list(tensor.shape)} has layout {tensor.layout}; the engine moves"
            " dense tensors: call .to_dense(), or send indices and values one after the other"
        )
    code = _TORCH_CODES.get(tensor.dtype)
    if code is None:
        raise _unsupported(tensor.dtype, tensor.shape)
    return code


def _numpy_code(array: np.ndarray) -> int:
    if not isinstance(array, np.ndarray):
        raise UsageError(
            f"expected a torch.Tensor or numpy.ndarray, got {type(array).__name__}; wrap plain"
            " numbers with torch.tensor(...)"
        )
    code = _NUMPY_CODES.get(array.dtype)
    if code is None:
        raise _unsupported(array.dtype, array.shape)
    return code


def _unsupported(dtype: object, shape: Sequence[int]) -> UnsupportedTensor:
    hint = "; view it as real numbers first" if "complex" in str(dtype) else ""
    return UnsupportedTensor(
        f"tensor of shape {list(shape)} has dtype {dtype}; the engine moves"
        f" {', '.join(_core.DTYPES)}{hint}"
    )


def empty_like(tensor: Tensor) -> Tensor:
    """Return a new contiguous tensor or array of the same shape, dtype and device."""
    if isinstance(tensor, torch.Tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return np.empty(tensor.shape, dtype=tensor.dtype)


def split_rows(tensor: Tensor, num_parts: int) -> list[Tensor]:
    """Return views of equal parts along the first dimension."""
    rows = tensor.shape[0] if tensor.ndim else 0
    if tensor.ndim == 0 or rows % num_parts:
        raise UsageError(
            f"a tensor of shape {list(tensor.shape)} cannot be split into {num_parts} equal parts"
            " along its first dimension; pass a list of tensors for uneven parts"
        )
    size = rows // num_parts
    return [tensor[i * size : (i + 1) * size] for i in range(num_parts)]


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size of a contiguous tensor of that shape."""
    return math.prod(shape) * dtype.itemsize


def op_code(op: str, dtype: int, *, truncates: bool = False) -> int:
    """Return the engine's number of a reduction; raise if the dtype does not support it.

    `truncates`: a mean of integers is wanted, rounded towards zero.
    """
    code = _OPS.get(op)
    if code is None:
        raise UsageError(f"unknown reduction {op!r}; choose one of {', '.join(sorted(_OPS))}")
    require_supported(code, dtype, truncates=truncates)
    return code


def require_supported(op: int, dtype: int, *, truncates: bool = False) -> None:
    """Raise UnsupportedTensor if a reduction is not defined for a dtype."""
    may_truncate = truncates and dtype != _CODES["bool"]
    if op == _OPS["mean"] and dtype not in FLOATING and not may_truncate:
        raise UnsupportedTensor(
            f"mean of {_core.DTYPES[dtype]} would not be an integer; convert the tensor to a"
            " floating-point dtype, or reduce with sum and divide"
        )
    if op in _BITWISE and dtype in FLOATING:
        raise UnsupportedTensor(
            f"{_core.OPS[op]} works on integers and bool, not on {_core.DTYPES[dtype]}"
        )


def common_dtype(kind: str, buffers: Sequence[Buffer]) -> tuple[int, Sequence[int]]:
    """Return the dtype of all buffers and the shape of the first; raise if the dtypes differ."""
    if not buffers:
        return 0, ()
    dtype = buffers[0].dtype
    for buffer in buffers:
        if buffer.dtype != dtype:
            raise UsageError(
                f"{kind}: tensors of {_core.DTYPES[dtype]} and {_core.DTYPES[buffer.dtype]} in one"
                " call; convert them to one dtype"
            )
    return dtype, buffers[0].shape


def require_match(source: Buffer, target: Buffer, kind: str) -> None:
    """Raise UsageError if the result has another size or dtype than the input."""
    if source.count != target.count or source.dtype != target.dtype:
        raise UsageError(
            f"{kind}: `out` is {_core.DTYPES[target.dtype]}{list(target.shape)}, expected"
            f" {_core.DTYPES[source.dtype]}{list(source.shape)}"
        )
