"""Other people's arrays: numpy, torch, DLPack and the buffer protocol, seen where they lie.

An array becomes a numpy array or a torch tensor on the same memory. From there it is either used in
place, as a flat tensor, or copied to memory that the engine can use.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from paceline.errors import UnsupportedTensor, UsageError

Array: TypeAlias = np.ndarray | torch.Tensor


def seen(thing: object, what: str) -> Array:
    """Return an array on the memory of whatever holds numbers; UsageError if nothing does."""
    if isinstance(thing, torch.Tensor):
        if thing.device.type != "cpu" or thing.layout is not torch.strided:
            raise UnsupportedTensor(
                f"{what} is a {thing.layout} tensor on {thing.device}; the client takes dense CPU"
                " tensors: call .to_dense() or .cpu() first"
            )
        return thing.detach()
    if isinstance(thing, np.ndarray):
        return thing
    try:
        if hasattr(thing, "__dlpack__"):
            return seen(torch.utils.dlpack.from_dlpack(thing), what)
        return np.asarray(memoryview(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise UsageError(
            f"{what} is {type(thing).__name__}, which is no array ({error}); pass a numpy array, a"
            " tensor, or anything with DLPack or the buffer protocol: numpy.asarray(...) makes one"
        ) from None


def shape_of(array: Array) -> tuple[int, ...]:
    return tuple(array.shape)


def dtype_name(array: Array) -> str:
    """Return the name that numpy and torch agree on: float32."""
    if isinstance(array, torch.Tensor):
        return str(array.dtype).removeprefix("torch.")
    return array.dtype.name if array.dtype.isnative else str(array.dtype)


def flat(array: Array) -> torch.Tensor | None:
    """Return a flat tensor on the same memory; None if the memory is strided or read-only."""
    if isinstance(array, np.ndarray):
        if not (array.flags.c_contiguous and array.flags.writeable):
            return None
        array = torch.from_numpy(array)
    return array.view(-1) if array.is_contiguous() and not array.is_neg() else None


def copy(target: Array, source: Array) -> None:
    """Copy numbers between arrays of the same shape and dtype, whatever their strides."""
    if isinstance(target, np.ndarray) and isinstance(source, torch.Tensor):
        source = source.numpy()
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    elif isinstance(source, np.ndarray):
        np.copyto(target.numpy(), source)
    else:
        target.copy_(source)


def require_writeable(array: Array, what: str) -> None:
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise UsageError(f"{what} is read-only; pass an array that can be written to")


def same_kind(result: torch.Tensor, *, as_torch: bool) -> Any:
    """Return a tensor as numpy array, unless torch is asked for or numpy lacks the dtype."""
    return result if as_torch or result.dtype is torch.bfloat16 else result.numpy()
