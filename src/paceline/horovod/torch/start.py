"""Start one operation on torch tensors. Everything else of this package stands on these functions.

Each returns a Pending: the engine's work, and how the result is made from what the engine wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.tensors import Buffer, op_code, result_buffer
from paceline.errors import UsageError
from paceline.horovod import timeline
from paceline.horovod.handles import Pending, translated
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.reductions import Average, detail_of, engine_op

_IN_FLOAT32 = (torch.float16, torch.bfloat16)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor times a factor, computed in float64 for integers and float32 for float16."""
    if tensor.dtype in _IN_FLOAT32:
        return (tensor.float() * factor).to(tensor.dtype)
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.double() * factor).trunc().to(tensor.dtype)


class Reduction:
    """The arguments of a reduction; averages of integers are truncated."""

    def __init__(self, op: int, prescale: float, postscale: float, described: str = "") -> None:
        self._op = engine_op(op)
        self._pre, self._post = prescale, postscale
        self.detail = detail_of(prescale, postscale, described)

    def code(self, dtype: int) -> int:
        """Return the engine's number of the reduction."""
        return op_code(self._op, dtype, truncates=True)

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what is sent."""
        return tensor if self._pre == 1.0 else scaled(tensor, self._pre)

    def after(self, output: torch.Tensor) -> None:
        """Change the reduced tensor in place."""
        if self._post != 1.0:
            output.copy_(scaled(output, self._post))


def start_allreduce(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
    *,
    described: str = "",
) -> Pending:
    """Reduce `tensor` into `output`, which may be the same.

    `described`: what else has to be alike on all ranks.
    """
    group = process_set.named
    name = name or process_set.next_name("allreduce")
    reduction = Reduction(op, *scales, described)
    source, target = Buffer(reduction.before(tensor.detach())), result_buffer(output.detach())
    code = reduction.code(source.dtype)
    options: dict[str, Any] = {"shape": tensor.shape, "op": code, "detail": reduction.detail}
    with translated():
        work = group.start("all_reduce", name, [source], [target], **options)

    def finish() -> torch.Tensor:
        target.write_back()
        reduction.after(output.detach())
        return output

    return Pending(f"allreduce.{name}", work, finish)


def allreduce_now(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """Return the mean of a floating-point tensor; the fast path of `allreduce`."""
    group = process_set.named
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    source, target = Buffer(tensor), Buffer(output)
    name = name or process_set.next_name("allreduce")
    started_s = timeline.now_s()
    with translated():
        group.all_reduce(name, source, target, op_code("mean", source.dtype), 0)
    if started_s:
        timeline.add(f"allreduce.{name}", started_s)
    return output


def start_allgather(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Pending:
    """Concatenate the tensors of all ranks along the first dimension."""
    group = process_set.named
    if tensor.dim() == 0:
        raise UsageError("allgather: a tensor without dimensions; use tensor.unsqueeze(0)")
    name = name or process_set.next_name("allgather")
    source = Buffer(tensor.detach())
    with translated():
        work = group.start("all_gather", name, [source], shape=tensor.shape)
    rest = list(tensor.shape[1:])

    def finish() -> torch.Tensor:
        output = _from_bytes(work.output(), tensor.dtype)
        width = math.prod(rest)
        rows = output.numel() // width if width else tensor.shape[0] * group.size
        return output.reshape([rows, *rest])

    return Pending(f"allgather.{name}", work, finish)


def _from_bytes(memory: object, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.from_numpy(memory)
    return flat.view(dtype) if flat.numel() else torch.empty(0, dtype=dtype)


def start_broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> Pending:
    """Copy the root's tensor into `output` of every rank."""
    group = process_set.named
    root = process_set.member_of(root_rank, "broadcast")
    name = name or process_set.next_name("broadcast")
    is_root = group.rank == root
    source = Buffer(tensor.detach()) if is_root else None
    target = None if is_root else result_buffer(output.detach())
    sources, targets = [source] if source else [], [target] if target else []
    with translated():
        work = group.start("broadcast", name, sources, targets, shape=tensor.shape, root=root)

    def finish() -> torch.Tensor:
        if target is not None:
            target.write_back()
        elif output is not tensor:
            output.detach().copy_(tensor.detach())
        return output

    return Pending(f"broadcast.{name}", work, finish)


def start_alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
) -> Pending:
    """Send rows to each rank; the result is (rows received, rows from each rank)."""
    group = process_set.named
    counts = _row_counts(tensor, splits, group.size)
    name = name or process_set.next_name("alltoall")
    rows = tensor.detach().contiguous()
    parts = torch.split(rows[: sum(counts)], counts)
    with translated():
        work = group.start("all_to_all", name, [Buffer(one) for one in parts], shape=tensor.shape)
    rest = list(tensor.shape[1:])

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        width = math.prod(rest)
        received = [count // width if width else 0 for count in work.counts()]
        output = _from_bytes(work.output(), tensor.dtype).reshape([sum(received), *rest])
        return output, torch.tensor(received, dtype=torch.int32)

    return Pending(f"alltoall.{name}", work, finish)


def _row_counts(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int
) -> list[int]:
    if tensor.dim() == 0:
        raise UsageError("alltoall: a tensor without dimensions; use tensor.unsqueeze(0)")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise UsageError(
                f"alltoall: {rows} rows cannot be divided evenly among {size} ranks; pass splits"
            )
        return [rows // size] * size
    counts = [int(count) for count in (splits.tolist() if torch.is_tensor(splits) else splits)]
    if len(counts) != size or any(count < 0 for count in counts) or sum(counts) > rows:
        raise UsageError(
            f"alltoall: splits {counts} for {rows} rows and {size} ranks; pass one count of rows"
            " for each rank, at most all rows together"
        )
    return counts


def start_reducescatter(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Pending:
    """Reduce and return this rank's rows; the first ranks get one more if they do not divide."""
    group = process_set.named
    if op not in (Average, 1):
        raise UsageError(f"reducescatter: op {op!r} is not supported; pass Average or Sum")
    if tensor.dim() == 0:
        raise UsageError("reducescatter: a tensor without dimensions; use tensor.unsqueeze(0)")
    name = name or process_set.next_name("reducescatter")
    reduction = Reduction(op, *scales)
    rows, extra = divmod(tensor.shape[0], group.size)
    counts = [rows + (member < extra) for member in range(group.size)]
    sent = reduction.before(tensor.detach()).contiguous()
    parts = torch.split(sent, counts)
    output = torch.empty([counts[group.rank], *tensor.shape[1:]], dtype=tensor.dtype)
    target = Buffer(output)
    code = reduction.code(target.dtype)
    options: dict[str, Any] = {"shape": tensor.shape, "op": code, "detail": reduction.detail}
    with translated():
        sources = [Buffer(one) for one in parts]
        work = group.start("reduce_scatter", name, sources, [target], **options)

    def finish() -> torch.Tensor:
        reduction.after(output)
        return output

    return Pending(f"reducescatter.{name}", work, finish)


def start_barrier(process_set: ProcessSet) -> Pending:
    """Wait until every rank of the set has called this."""
    name = process_set.next_name("barrier")
    with translated():
        work = process_set.named.start("barrier", name, background=False)
    return Pending("barrier", work, lambda: None)


def start_join(process_set: ProcessSet) -> Pending:
    """Contribute zeros until all ranks have joined; the result is the last rank."""
    with translated():
        work = process_set.named.start("join", "join", background=False)
    return Pending("join", work, work.last_joined)
