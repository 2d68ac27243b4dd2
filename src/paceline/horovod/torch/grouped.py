"""Grouped operations: several tensors under one name; the result is a list.

The tensors are named `name.0`, `name.1`, ... and start one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.horovod import handles
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Average, choose_op
from paceline.horovod.torch import operations, start
from paceline.horovod.torch.compression import Compression
from paceline.horovod.torch.operations import wants_grad

Tensors = Sequence[torch.Tensor]


def _names(name: str | None, kind: str, count: int, process_set: ProcessSet) -> list[str]:
    name = name or process_set.next_name(f"grouped_{kind}")
    return [f"{name}.{number}" for number in range(count)]


def _start_all(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    one: Callable[[torch.Tensor, str], handles.Pending],
) -> handles.Several:
    tensors = list(tensors)
    names = _names(name, kind, len(tensors), process_set)
    return handles.Several([one(*pair) for pair in zip(tensors, names, strict=True)])


def _start_allreduces(
    tensors: Tensors,
    in_place: bool,
    average: bool | None,
    name: str | None,
    op: int | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> handles.Several:
    op = choose_op(op, average)

    def one(tensor: torch.Tensor, label: str) -> handles.Pending:
        output = tensor
        if not in_place:
            output = torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()
        return start.start_allreduce(tensor, output, label, op, scales, process_set)

    return _start_all("allreduce", tensors, name, process_set, one)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reduced tensors; the means by default."""
    tensors = list(tensors)
    sent = [compression.compress(tensor) for tensor in tensors]
    if any(wants_grad(tensor) for tensor, _ in sent):
        op = choose_op(op, average)
        names = _names(name, "allreduce", len(tensors), process_set)
        scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return [
            operations.allreduce(
                tensor, None, label, compression, op, process_set=process_set, **scales
            )
            for tensor, label in zip(tensors, names, strict=True)
        ]
    scale = (prescale_factor, postscale_factor)
    plain = [tensor for tensor, _ in sent]
    reduced = _start_allreduces(plain, False, average, name, op, scale, process_set).result()
    return [compression.decompress(r, c) for r, (_, c) in zip(reduced, sent, strict=True)]


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce`; return its handle."""
    scales = (prescale_factor, postscale_factor)
    return handles.add(_start_allreduces(tensors, False, average, name, op, scales, process_set))


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce_`, in place; return its handle."""
    scales = (prescale_factor, postscale_factor)
    return handles.add(_start_allreduces(tensors, True, average, name, op, scales, process_set))


def grouped_allreduce_(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Reduce tensors in place. Arguments as for `grouped_allreduce_async_`."""
    return operations.synchronize(grouped_allreduce_async_(*args, **kwargs))  # type: ignore[no-any-return]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `grouped_allgather`; return its handle."""

    def one(tensor: torch.Tensor, label: str) -> handles.Pending:
        return start.start_allgather(tensor, label, process_set)

    return handles.add(_start_all("allgather", tensors, name, process_set, one))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return for each tensor the concatenation over all ranks."""
    tensors = list(tensors)
    if not any(map(wants_grad, tensors)):
        return operations.synchronize(grouped_allgather_async(tensors, name, process_set))  # type: ignore[no-any-return]
    names = _names(name, "allgather", len(tensors), process_set)
    return [
        operations.allgather(tensor, label, process_set)
        for tensor, label in zip(tensors, names, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `grouped_reducescatter`; return its handle."""
    scales = (prescale_factor, postscale_factor)

    def one(tensor: torch.Tensor, label: str) -> handles.Pending:
        return start.start_reducescatter(tensor, label, op, scales, process_set)

    return handles.add(_start_all("reducescatter", tensors, name, process_set, one))


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of each reduced tensor."""
    tensors = list(tensors)
    names = _names(name, "reducescatter", len(tensors), process_set)
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return [
        operations.reducescatter(tensor, label, compression, op, process_set, **scales)
        for tensor, label in zip(tensors, names, strict=True)
    ]
