"""The optimizer's state of a shard on its way between a server and a worker: both ends.

Plain values travel in the message; tensors follow it, one after the other, in the order of their
entries. This is rare (a checkpoint), so tensors are sent also on one host, and they are copied
before: updates continue while they are sent. Entries are about PIECES: what a
shard has of one parameter. Any one worker may fetch, whenever it likes; the state that a worker
sends replaces what was there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.errors import ShapeMismatch, UsageError
from paceline.ps import messages as m
from paceline.ps.placement import Placement
from paceline.ps.server.optimizer import StateEntry
from paceline.ps.server.table import Table
from paceline.ps.spec import ShardPiece, ShardSpec

if TYPE_CHECKING:
    from paceline.ps.client.remote_table import RemoteTable

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
}


def read_state(
    table: Table, shard: int
) -> tuple[tuple[m.EncodedStateEntry, ...], list[torch.Tensor]]:
    """Return a shard's state as entries and the tensors that follow."""
    entries, tensors = to_entries(table.state(shard))
    return entries, [tensor.clone() for tensor in tensors]


def to_entries(
    state: Sequence[StateEntry],
) -> tuple[tuple[m.EncodedStateEntry, ...], list[torch.Tensor]]:
    """Split state into what goes into the message and the tensors that follow."""
    entries, tensors = [], []
    for entry in state:
        if isinstance(entry.value, torch.Tensor):
            value = entry.value.detach().contiguous()
            dtype = str(value.dtype).removeprefix("torch.")
            entries.append(
                m.EncodedStateEntry(entry.piece, entry.key, None, dtype, tuple(value.shape))
            )
            tensors.append(value.reshape(-1))
        else:
            entries.append(m.EncodedStateEntry(entry.piece, entry.key, entry.value))
    return tuple(entries), tensors


def landing(
    entries: Sequence[m.EncodedStateEntry], pieces: Sequence[ShardPiece] | None = None
) -> list[torch.Tensor]:
    """Make room for the tensors of these entries, which belong to these pieces."""
    for entry in entries:
        _check(entry, pieces)
    tensors = (entry for entry in entries if entry.dtype)
    return [torch.empty(math.prod(one.shape), dtype=_DTYPES[one.dtype]) for one in tensors]


def _check(entry: m.EncodedStateEntry, pieces: Sequence[ShardPiece] | None) -> None:
    found = f"optimizer state {entry.key[:40]!r} of piece {entry.piece}"
    if not entry.dtype and entry.value is None:
        raise UsageError(f"{found} has neither a value nor a tensor")
    if entry.dtype and entry.dtype not in _DTYPES:
        raise UsageError(f"{found} is of {entry.dtype[:20]!r}; one of {', '.join(_DTYPES)}")
    if pieces is None:
        return
    if entry.piece >= len(pieces):
        raise UsageError(f"{found}, but the shard has {len(pieces)} pieces; load another state")
    count = pieces[entry.piece].count
    if math.prod(entry.shape) > max(count, 1):
        raise ShapeMismatch(
            f"{found} has shape {list(entry.shape)[:8]}, but that is a piece of {count} elements of"
            f" {pieces[entry.piece].name!r}; load the state of the same model"
        )


def from_entries(
    entries: Sequence[m.EncodedStateEntry], tensors: Sequence[torch.Tensor]
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


def fetch(table: RemoteTable) -> Iterator[tuple[Placement, ShardSpec, list[StateEntry]]]:
    """Yield the entries of every shard."""
    for link, number, spec, part in table.shards():
        landed: list[torch.Tensor] = []

        def land(reply: m.Reply, landed: list[torch.Tensor] = landed) -> Sequence[torch.Tensor]:
            landed[:] = landing(reply.entries)
            return landed

        on_server = table.table_on(link)
        reply = link.ask(
            lambda seq, t=on_server, n=number: m.FetchState(seq, t, n),  # type: ignore[misc]
            into=land,
        ).wait()
        yield part, spec, list(from_entries(reply.entries, landed))


def send(table: RemoteTable, entries: Callable[[Placement, ShardSpec], list[StateEntry]]) -> None:
    """Replace the entries of every shard. Blocks."""
    for link, number, spec, part in table.shards():
        encoded, tensors = to_entries(entries(part, spec))
        on_server = table.table_on(link)
        link.ask(
            lambda seq, t=on_server, n=number, e=encoded: m.LoadState(seq, t, n, e),  # type: ignore[misc]
            payload=lambda tensors=tensors: tensors,  # type: ignore[misc]
        ).wait()
