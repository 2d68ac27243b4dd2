"""Operations of gloo's interface that need several operations of the engine.

`monitored_barrier` finds the missing ranks: every other rank sends a message to rank 0, and rank 0
sends the list of missing ranks to those that arrived. `sparse_all_reduce` gathers the non-zero
values of all ranks and adds them up on every rank in rank order.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from paceline.comm.group import Group
from paceline.errors import PeerError, PeerTimeout
from paceline.runtime.work import Work

if TYPE_CHECKING:
    from paceline.comm.torch.backend import PacelineProcessGroup

_TAG = 1 << 40  # torch's own tags are 32-bit numbers
_GRACE_S = 5.0  # the other ranks wait this much longer than rank 0, to receive its list


def monitored_barrier(
    group: Group, number: int, timeout: timedelta | None, wait_all_ranks: bool
) -> None:
    """Wait for all ranks; raise PeerTimeout that names the missing ones.

    Rank 0 names the first missing rank, or all of them with `wait_all_ranks`.
    """
    limit_s = group.timeout_s if timeout is None else timeout.total_seconds()
    if group.size == 1:
        return
    if group.rank == 0:
        _watch_arrivals(group, _TAG + number, limit_s, wait_all_ranks)
    else:
        _arrive(group, _TAG + number, limit_s)


def _watch_arrivals(group: Group, tag: int, limit_s: float, wait_all_ranks: bool) -> None:
    deadline_s = time.monotonic() + limit_s
    others = range(1, group.size)
    notes = {rank: torch.zeros(1, dtype=torch.uint8) for rank in others}
    arrivals: dict[int, Any] = {
        rank: group.recv(notes[rank], rank, tag=tag, async_op=True) for rank in others
    }
    if limit_s <= 0:
        raise PeerTimeout(f"Rank 0 timed out in monitoredBarrier after {_ms(limit_s)} ms", rank=0)
    is_missing = torch.zeros(group.size, dtype=torch.uint8)
    for rank, arrival in arrivals.items():
        if not _ends_by(arrival, deadline_s):
            is_missing[rank] = 1
            if not wait_all_ranks:
                break
    arrived = [rank for rank, arrival in arrivals.items() if arrival.done()]
    answers: list[Any] = [group.send(is_missing, rank, tag=tag, async_op=True) for rank in arrived]
    for answer in answers:
        _ends_by(answer, time.monotonic() + _GRACE_S)
    missing = is_missing.nonzero().flatten().tolist()
    if missing:
        names = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        raise PeerTimeout(
            f"{names} failed to pass monitoredBarrier in {_ms(limit_s)} ms: check the output of"
            " that rank.",
            rank=group.ranks[missing[0]],
        )


def _arrive(group: Group, tag: int, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s + _GRACE_S
    note, is_missing = torch.zeros(1, dtype=torch.uint8), torch.zeros(group.size, dtype=torch.uint8)
    answer: Any = group.recv(is_missing, 0, tag=tag, async_op=True)
    prefix = (
        f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while"
        " waiting for send/recv from rank 0"
    )
    try:
        arrival: Any = group.send(note, 0, tag=tag, async_op=True)
        if not _ends_by(arrival, deadline_s) or not _ends_by(answer, deadline_s):
            raise PeerTimeout(f"{prefix}: no answer in {_ms(limit_s)} ms", rank=group.ranks[0])
    except PeerTimeout:
        raise
    except PeerError as error:
        raise type(error)(f"{prefix}: {error}", rank=error.rank) from error
    if is_missing.any():
        missing = is_missing.nonzero().flatten().tolist()
        names = ", ".join(map(str, missing))
        raise PeerTimeout(f"{prefix}: rank {names} is missing", rank=group.ranks[missing[0]])


def _ends_by(work: Work[object], deadline_s: float) -> bool:
    """Return whether an operation ends by the deadline; a late one continues. Raise its error."""
    try:
        work.wait(max(0.0, deadline_s - time.monotonic()))
    except PeerTimeout:
        if work.done():
            raise
        return False
    return True


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def sparse_all_reduce(group: PacelineProcessGroup, tensor: Tensor) -> Tensor:
    """Return the sum of sparse tensors that may differ in their non-zero indices; blocks."""
    mine = tensor.to_sparse(layout=torch.sparse_coo).coalesce()
    indices, values = mine._indices().contiguous(), mine._values().contiguous()
    options = c10d.AllgatherOptions()
    options.asyncOp = False
    counts = torch.zeros(group.size(), dtype=torch.int64)
    group.all_gather_single(counts, torch.tensor([values.shape[0]]), options)
    sizes = counts.tolist()
    all_indices = [indices.new_empty((indices.shape[0], n)) for n in sizes]
    all_values = [values.new_empty((n, *values.shape[1:])) for n in sizes]
    group.allgather([all_indices], [indices], options)
    group.allgather([all_values], [values], options)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, dim=1), torch.cat(all_values), tensor.shape
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    return total
