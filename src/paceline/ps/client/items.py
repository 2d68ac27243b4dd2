"""What a table is made of, as a worker has it, and how that is cut into shards.

An ITEM is one flat tensor of the table: a bucket of a model, or an array. It is HELD by several
parameters, one after the other; placement.py cuts it into parts, each a shard on one server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.comm.shared_memory import HostTensor
from paceline.compress.sign_bits import SIGNS_IN_WORD
from paceline.ps import messages as m
from paceline.ps.client.link import ServerLink
from paceline.ps.placement import Placement
from paceline.ps.spec import ShardPiece, ShardSpec


@dataclass(frozen=True)
class ItemParam:
    """One parameter in an item."""

    name: str
    group: int  # number of its param group
    start: int
    count: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """One flat tensor of the table, as this worker has it."""

    label: str
    held: Sequence[ItemParam]
    grads: torch.Tensor
    params: torch.Tensor
    average: torch.Tensor | None = None  # where averages land; None: this worker wants none
    is_shared: bool = False  # both lie in memory that all workers and servers of the host share
    shared_memory: tuple[torch.Tensor, torch.Tensor] | None = None  # (params, average): its owner's
    # What this worker sees of (params, average), if it maps the memory of servers of its host.
    views: tuple[HostTensor, HostTensor] | None = None
    first_sign: int | None = 0  # votes: index in the model of the element of its first bit


@dataclass(frozen=True)
class RemoteShard:
    """One part of an item, and where it is."""

    link: ServerLink
    number: int  # among the shards of this table on that server
    part: Placement

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this part of one of the item's flat tensors."""
        return flat[self.part.start : self.part.stop]


def buffer_of(item: Item, shard: RemoteShard) -> m.WorkerBuffer:
    """Return this worker's own memory for a shard, if the server can write to it."""
    if item.is_shared or not shard.link.is_local:
        return m.WorkerBuffer()
    average = None if item.average is None else shard.link.locate(shard.of(item.average))
    return m.WorkerBuffer(shard.link.locate(shard.of(item.params)), average)


def shared_memory_of(
    items: Sequence[Item], shards: Sequence[RemoteShard]
) -> Iterator[m.SharedMemory]:
    """Return the shared memory in which shards live; nothing where they do not."""
    for shard in shards:
        shared = items[shard.part.item].shared_memory
        if shared is None:
            return
        params, average = (shard.link.locate(shard.of(flat)) for flat in shared)
        assert params is not None and average is not None
        yield m.SharedMemory(params, average)


def spec_of(item: Item, part: Placement) -> ShardSpec:
    """Return what a part of an item is, for the server that holds it."""
    pieces = []
    for number, held in enumerate(item.held):
        start, stop = max(held.start, part.start), min(held.start + held.count, part.stop)
        if start < stop or (held.count == 0 and part.start <= held.start < part.stop):
            shape = held.shape if stop - start == held.count else (stop - start,)
            pieces.append(
                ShardPiece(held.name, number, held.group, start - part.start, stop - start, shape)
            )
    label = f"{item.label}[{part.start}:{part.stop}]"
    sign = 0 if item.first_sign is None else item.first_sign + part.start * SIGNS_IN_WORD
    dtype = dtype_name(item.params.dtype)
    return ShardSpec(label, dtype, part.stop - part.start, tuple(pieces), sign)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in messages: 'float32'."""
    return str(dtype).removeprefix("torch.")
