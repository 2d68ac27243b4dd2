"""Operations on single tensors: allreduce, allgather, broadcast, alltoall, reducescatter, join.

    allreduce           a new tensor; gradients flow through it
    allreduce_          in place
    allreduce_async(_)  returns a handle for `poll` and `synchronize`

Operations are matched by name, in any order. Without a name they are matched by their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.horovod import handles
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Average, Sum, choose_op
from paceline.horovod.torch import start
from paceline.horovod.torch.compression import Compression

Compressor = Any  # a class of compression.py, or one like them
Splits = torch.Tensor | Sequence[int] | None


def wants_grad(tensor: torch.Tensor) -> bool:
    """Return whether gradients flow through an operation on this tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def _applied(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


# -- allreduce --------------------------------------------------------------------------------


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduced tensor of all ranks; the mean by default."""
    op, scales = choose_op(op, average), (prescale_factor, postscale_factor)
    if tensor.layout is not torch.strided:
        handle = sparse_allreduce_async(tensor, name, op, process_set)
        return synchronize(handle)  # type: ignore[no-any-return]
    sent, context = compression.compress(tensor)
    if wants_grad(sent):
        reduced = _applied(_Allreduce, sent, name, op, scales, process_set)
    elif op == Average and scales == (1.0, 1.0) and sent.dtype.is_floating_point:
        reduced = start.allreduce_now(sent, name, process_set)
    else:
        output = torch.empty_like(sent, memory_format=torch.contiguous_format)
        reduced = start.start_allreduce(sent, output, name, op, scales, process_set).result()
    return compression.decompress(reduced, context)  # type: ignore[no-any-return]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce`; return its handle."""
    op, scales = choose_op(op, average), (prescale_factor, postscale_factor)
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()
    return handles.add(start.start_allreduce(tensor, output, name, op, scales, process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce_`, in place; return its handle."""
    op, scales = choose_op(op, average), (prescale_factor, postscale_factor)
    return handles.add(start.start_allreduce(tensor, tensor, name, op, scales, process_set))


def allreduce_(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Reduce a tensor in place and return it. Arguments as for `allreduce_async_`."""
    return synchronize(allreduce_async_(*args, **kwargs))  # type: ignore[no-any-return]


class _Allreduce(torch.autograd.Function):
    """The gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, name: Any, op: Any, scales: Any, process_set: Any) -> Any:
        ctx.arguments = (op, scales, process_set)
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return start.start_allreduce(tensor, output, name, op, scales, process_set).result()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, (pre, post), process_set = ctx.arguments
        factors = {"prescale_factor": pre, "postscale_factor": post}
        return allreduce(grads[0], op=op, process_set=process_set, **factors), *[None] * 4


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to add up (or average) sparse tensors: all ranks' indices and values are gathered."""
    op = choose_op(op, None)
    size = process_set.named.size
    name = name or process_set.next_name("sparse")
    tensor = tensor.detach().coalesce()
    indices = tensor.indices().t().contiguous()
    parts = [
        start.start_allgather(indices, f"{name}.indices", process_set),
        start.start_allgather(tensor.values(), f"{name}.values", process_set),
    ]
    shape = tensor.shape

    def combine(results: list[torch.Tensor]) -> torch.Tensor:
        gathered, values = results
        total = torch.sparse_coo_tensor(gathered.t(), values, shape).coalesce()
        return total / size if op == Average else total

    return handles.add(_Combined(parts, combine))


class _Combined(handles.Several):
    """Several operations whose results become one."""

    def __init__(self, parts: Sequence[handles.Pending], combine: Any) -> None:
        super().__init__(parts)
        self._combine = combine

    def result(self) -> Any:
        return self._combine(super().result())


# -- allgather, broadcast ---------------------------------------------------------------------


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated; their first dimensions may differ."""
    if wants_grad(tensor):
        return _applied(_Allgather, tensor, name, process_set)  # type: ignore[no-any-return]
    return start.start_allgather(tensor, name, process_set).result()  # type: ignore[no-any-return]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `allgather`; return its handle."""
    return handles.add(start.start_allgather(tensor, name, process_set))


class _Allgather(torch.autograd.Function):
    """The gradient is the mean of all ranks' gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, name: Any, process_set: Any) -> Any:
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        return start.start_allgather(tensor, name, process_set).result()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        reduced = allreduce(grads[0], op=Average, process_set=ctx.process_set)
        rows = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        offset = int(rows[: ctx.process_set.rank()].sum())
        return reduced.narrow(0, offset, ctx.rows), None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the root's tensor on every rank."""
    if wants_grad(tensor):
        return _applied(_Broadcast, tensor, root_rank, name, process_set)  # type: ignore[no-any-return]
    return synchronize(broadcast_async(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `broadcast`; return its handle."""
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()
    return handles.add(start.start_broadcast(tensor, output, root_rank, name, process_set))


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `broadcast_`, in place; return its handle."""
    return handles.add(start.start_broadcast(tensor, tensor, root_rank, name, process_set))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copy the root's tensor into this one and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


class _Broadcast(torch.autograd.Function):
    """The root gets the mean of all gradients, the other ranks zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, root_rank: Any, name: Any, process_set: Any) -> Any:
        ctx.arguments = (root_rank, process_set)
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        root_rank, process_set = ctx.arguments
        reduced = allreduce(grads[0], op=Average, process_set=process_set)
        is_root = process_set.rank() == process_set.member_of(root_rank, "broadcast")
        return reduced if is_root else torch.zeros_like(reduced), None, None, None


# -- alltoall, reducescatter ------------------------------------------------------------------


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[j]` rows to rank j; return the received rows, with `splits` also how many came
    from each rank."""
    if wants_grad(tensor):
        received = _applied(_Alltoall, tensor, splits, name, process_set)
    else:
        received = start.start_alltoall(tensor, splits, name, process_set).result()
    return received[0] if splits is None else received


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `alltoall`; return its handle."""
    pending = start.start_alltoall(tensor, splits, name, process_set)
    if splits is not None:
        return handles.add(pending)
    return handles.add(_Combined([pending], lambda results: results[0][0]))


class _Alltoall(torch.autograd.Function):
    """The gradient goes back by the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: Any, process_set: Any) -> Any:
        rows, received = start.start_alltoall(tensor, splits, name, process_set).result()
        ctx.received, ctx.process_set, ctx.shape = received, process_set, tensor.shape
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back, _ = alltoall(grads[0].contiguous(), ctx.received, process_set=ctx.process_set)
        if back.shape[0] < ctx.shape[0]:  # rows that were not sent
            unsent = torch.zeros([ctx.shape[0] - back.shape[0], *ctx.shape[1:]], dtype=back.dtype)
            back = torch.cat([back, unsent])
        return back, None, None, None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor."""
    scales = (prescale_factor, postscale_factor)
    sent, context = compression.compress(tensor)
    if wants_grad(sent):
        rows = _applied(_Reducescatter, sent, name, op, scales, process_set)
    else:
        rows = start.start_reducescatter(sent, name, op, scales, process_set).result()
    return compression.decompress(rows, context)  # type: ignore[no-any-return]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `reducescatter`; return its handle."""
    scales = (prescale_factor, postscale_factor)
    return handles.add(start.start_reducescatter(tensor, name, op, scales, process_set))


class _Reducescatter(torch.autograd.Function):
    """The gradients of all rows are gathered; for Sum they count once for each rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, name: Any, op: Any, scales: Any, process_set: Any) -> Any:
        ctx.arguments = (op, scales, process_set)
        return start.start_reducescatter(tensor, name, op, scales, process_set).result()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, (pre, post), process_set = ctx.arguments
        factor = pre * post * (process_set.named.size if op == Sum else 1)
        grad = grads[0] if factor == 1 else start.scaled(grads[0], factor)
        return allgather(grad.contiguous(), process_set=process_set), *[None] * 4


# -- waiting ----------------------------------------------------------------------------------

poll = handles.poll


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None if it has been taken already."""
    return handles.synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called this."""
    start.start_barrier(process_set).result()


def join(device: int = -1) -> int:  # noqa: ARG001
    """Take part in the other ranks' allreduces with zeros until all ranks have joined.

    Returns the rank that joined last. Meanwhile `allgather` and `broadcast` fail on other ranks.
    """
    last = start.start_join(global_process_set).result()
    global_process_set.restart_names()  # ranks have started different numbers of operations
    return int(last)
