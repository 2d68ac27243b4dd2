"""Python values between ranks: plain values, tensors and arrays, without pickle.

A message is a length, then msgpack of the plain part and of the tensors' dtypes and shapes, then
the tensors' bytes. What is not plain is refused on the rank that sends it, and all ranks raise the
same error: no rank waits.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import torch

from paceline.comm.tensors import Buffer
from paceline.errors import ProtocolError, UsageError
from paceline.horovod.handles import translated
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.state.serializer import flatten_state, unflatten_state

_HEAD_BYTES = 8


class _Head(msgspec.Struct, frozen=True):
    """The part of a message before the tensors' bytes."""

    plain: Any
    dtypes: list[str]
    shapes: list[list[int]]
    problem: str = ""


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's value on every rank: plain values, tensors, numpy arrays, nested."""
    group = process_set.named
    root = process_set.member_of(root_rank, "broadcast_object")
    name = name or process_set.next_name("broadcast_object")
    mine = _encode_or_explain(obj, "broadcast_object") if group.rank == root else np.empty(0)
    size = np.array([mine.size], dtype=np.int64)
    _broadcast(group, f"{name}.sz", size, root)
    message = mine if group.rank == root else np.empty(int(size[0]), dtype=np.uint8)
    _broadcast(group, f"{name}.t", message, root)
    if group.rank == root:
        _raise_problem(message, root_rank)
        return obj
    return decode(message, root_rank)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    group = process_set.named
    name = name or process_set.next_name("allgather_object")
    mine = _encode_or_explain(obj, "allgather_object")
    with translated():
        work = group.start("all_gather", name, [Buffer(mine)], shape=mine.shape, background=False)
        work.wait()
    messages = np.split(work.output(), np.cumsum(work.counts())[:-1])
    ranks = process_set.ranks or list(range(group.size))
    return [decode(message, rank) for rank, message in zip(ranks, messages, strict=True)]


def _broadcast(group: Any, name: str, array: np.ndarray, root: int) -> None:
    parts = ([Buffer(array)], []) if group.rank == root else ([], [Buffer(array)])
    with translated():
        work = group.start(
            "broadcast", name, *parts, shape=array.shape, root=root, background=False
        )
        work.wait()


def _encode_or_explain(value: Any, what: str) -> np.ndarray:
    """Return the message of a value; if it cannot be sent, a message that says so.

    Whatever goes wrong here: the other ranks wait for a message.
    """
    try:
        return encode(value, what)
    except UsageError as error:
        problem = str(error)
    except Exception as error:
        problem = (
            f"{what}: a {type(value).__name__} cannot be sent ({type(error).__name__}: {error});"
            " send plain values, tensors and arrays: nothing is pickled"
        )
    return _message(_Head(None, [], [], problem), [])


def encode(value: Any, what: str) -> np.ndarray:
    """Return the message of a value as bytes; UsageError if a part of it is not plain."""
    plain, tensors = flatten_state(
        value, f"{what}: {type(value).__name__}", goal="sent: nothing is pickled"
    )
    tensors = [tensor.contiguous().cpu() for tensor in tensors]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    return _message(_Head(plain, dtypes, [list(tensor.shape) for tensor in tensors]), tensors)


def _message(head: _Head, tensors: list[torch.Tensor]) -> np.ndarray:
    encoded = msgspec.msgpack.encode(head)
    parts = [np.array([len(encoded)], dtype="<u8").view(np.uint8), np.frombuffer(encoded, np.uint8)]
    parts += [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors if tensor.numel()]
    return np.concatenate(parts)


def decode(message: np.ndarray, rank: int) -> Any:
    """Return the value of a message of that rank; ProtocolError if it is none."""
    head, at = _read_head(message, rank)
    if head.problem:
        raise UsageError(f"rank {rank}: {head.problem}")
    tensors = []
    try:
        for name, shape in zip(head.dtypes, head.shapes, strict=True):
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype) or any(length < 0 for length in shape):
                raise ValueError(f"{name} {shape}")
            end = at + math.prod(shape) * dtype.itemsize
            if end > message.size:
                raise ValueError("it ends too early")
            flat = torch.from_numpy(message[at:end].copy())
            empty = torch.empty(shape, dtype=dtype)
            tensors.append(flat.view(dtype).reshape(shape) if flat.numel() else empty)
            at = end
        return unflatten_state(head.plain, tensors)
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ProtocolError(f"rank {rank} sent a value that cannot be decoded: {error}") from None


def _read_head(message: np.ndarray, rank: int) -> tuple[_Head, int]:
    try:
        end = _HEAD_BYTES + int(message[:_HEAD_BYTES].view("<u8")[0])
        if end > message.size:
            raise ValueError("it ends too early")
        data = message[_HEAD_BYTES:end].tobytes()
        return msgspec.msgpack.decode(data, type=_Head), end
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise ProtocolError(f"rank {rank} sent a value that cannot be decoded: {error}") from None


def _raise_problem(message: np.ndarray, rank: int) -> None:
    head, _ = _read_head(message, rank)
    if head.problem:
        raise UsageError(f"rank {rank}: {head.problem}")
