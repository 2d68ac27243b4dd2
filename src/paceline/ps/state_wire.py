"""The optimizer's state of a shard on its way between a server and a worker.

Plain values travel in the message; tensors follow it, one after the other, in the order of their
entries. This is rare (a checkpoint), so tensors are sent also on one host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from paceline.errors import UsageError
from paceline.ps import messages as m
from paceline.ps.optimizer import StateEntry
from paceline.ps.table import Table

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
}


def read_state(table: Table, shard: int) -> tuple[tuple[m.Entry, ...], list[torch.Tensor]]:
    """Return a shard's state as entries and the tensors that follow."""
    return to_entries(table.state(shard))


def to_entries(state: Sequence[StateEntry]) -> tuple[tuple[m.Entry, ...], list[torch.Tensor]]:
    """Split state into what goes into the message and the tensors that follow."""
    entries, tensors = [], []
    for entry in state:
        if isinstance(entry.value, torch.Tensor):
            value = entry.value.detach().contiguous()
            dtype = str(value.dtype).removeprefix("torch.")
            entries.append(m.Entry(entry.piece, entry.key, None, dtype, tuple(value.shape)))
            tensors.append(value.reshape(-1))
        else:
            entries.append(m.Entry(entry.piece, entry.key, entry.value))
    return tuple(entries), tensors


def landing(entries: Sequence[m.Entry]) -> list[torch.Tensor]:
    """Make room for the tensors of these entries."""
    room = []
    for entry in entries:
        if not entry.dtype:
            continue
        if entry.dtype not in _DTYPES or any(size < 0 for size in entry.shape):
            raise UsageError(f"optimizer state {entry.key!r}: {entry.dtype[:20]}{entry.shape}")
        room.append(torch.empty(math.prod(entry.shape), dtype=_DTYPES[entry.dtype]))
    return room


def from_entries(
    entries: Sequence[m.Entry], tensors: Sequence[torch.Tensor]
) -> Iterator[StateEntry]:
    """Put entries and their tensors together again."""
    following = iter(tensors)
    for entry in entries:
        if entry.dtype:
            yield StateEntry(entry.piece, entry.key, next(following).view(entry.shape))
        else:
            assert entry.value is not None
            yield StateEntry(entry.piece, entry.key, entry.value)


def write_state(table: Table, request: m.LoadState, tensors: Sequence[torch.Tensor]) -> None:
    """Replace a shard's state."""
    table.load_state(request.shard, list(from_entries(request.entries, tensors)))
