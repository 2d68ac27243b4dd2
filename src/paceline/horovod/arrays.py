"""Operations on numpy arrays, for the frameworks whose tensors reach the engine as arrays.

Each blocks, and returns arrays in new memory. They are the operations of horovod/torch, so their
names, mismatches, averages of integers and scale factors are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError
from paceline.frameworks.averages import as_torch
from paceline.horovod.handles import Several
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.torch import start

Scales = tuple[float, float]


def _tensor(array: Any, kind: str) -> torch.Tensor:
    array = np.asarray(array)
    try:
        return as_torch(array)
    except TypeError:
        raise UsageError(f"{kind}: tensors of {array.dtype} cannot be sent") from None


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as an array; numpy's bfloat16 is that of ml_dtypes."""
    tensor = tensor.contiguous()
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # every framework with bfloat16 arrays brings it

    bits: np.ndarray = tensor.view(torch.uint16).numpy()
    return bits.view(ml_dtypes.bfloat16)


def allreduce(
    array: Any, name: str | None, op: int, scales: Scales, process_set: ProcessSet
) -> np.ndarray:
    """Return the reduced array."""
    tensor = _tensor(array, "allreduce")
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    pending = start.start_allreduce(tensor, output, name, op, scales, process_set)
    return as_array(pending.result())


def grouped_allreduce(
    arrays: list[Any], name: str, op: int, scales: Scales, process_set: ProcessSet
) -> list[np.ndarray]:
    """Return the reduced arrays; the operations run beside each other."""
    pending = []
    for number, array in enumerate(arrays):
        tensor = _tensor(array, "grouped_allreduce")
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        label = f"{name}.{number}"
        pending.append(start.start_allreduce(tensor, output, label, op, scales, process_set))
    return [as_array(one) for one in Several(pending).result()]


def allgather(array: Any, name: str | None, process_set: ProcessSet) -> np.ndarray:
    """Return the arrays of all ranks, concatenated."""
    tensor = _tensor(array, "allgather")
    return as_array(start.start_allgather(tensor, name, process_set).result())


def broadcast(array: Any, root: int, name: str | None, process_set: ProcessSet) -> np.ndarray:
    """Return the root's array."""
    tensor = _tensor(array, "broadcast")
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    pending = start.start_broadcast(tensor, output, root, name, process_set)
    return as_array(pending.result())


def broadcast_all(
    arrays: list[Any], root: int, names: list[str], process_set: ProcessSet
) -> list[np.ndarray]:
    """Return the root's arrays; the operations run beside each other."""
    pending = []
    for array, name in zip(arrays, names, strict=True):
        tensor = _tensor(array, "broadcast")
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        pending.append(start.start_broadcast(tensor, output, root, name, process_set))
    return [as_array(one) for one in Several(pending).result()]


def alltoall(
    array: Any, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows received, and how many came from each rank."""
    counts = None if splits is None else [int(count) for count in np.asarray(splits).tolist()]
    pending = start.start_alltoall(_tensor(array, "alltoall"), counts, name, process_set)
    rows, received = pending.result()
    return as_array(rows), as_array(received)


def reducescatter(
    array: Any, name: str | None, op: int, scales: Scales, process_set: ProcessSet
) -> np.ndarray:
    """Return this rank's rows of the reduced array."""
    tensor = _tensor(array, "reducescatter")
    pending = start.start_reducescatter(tensor, name, op, scales, process_set)
    return as_array(pending.result())
