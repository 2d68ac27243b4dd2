"""Assemble full tensors from the shards that the processes of a unit hold.

Each process writes its shard into zeros, and these are added as integers, so that not even the sign
of a zero changes. One tensor at a time, so that no process needs memory for more than it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object
from paceline.model_parallel.sharding.layout import LocalShard

Tensors = dict[str, torch.Tensor]
# Returns the rank that receives a tensor, by its name and the ranks that hold shards of it; None:
# all ranks receive it.
Receiver = Callable[[str, Sequence[int]], int | None]
_INTEGERS = {4: torch.int32, 8: torch.int64}


def to_all(_name: str, _holders: Sequence[int]) -> None:
    """Let every process receive every tensor."""


def to_holders_in_turn(size: int) -> Receiver:
    """Let one of the processes that hold a shard of a tensor receive it, in turn."""
    turns = [0] * size

    def receiver(_name: str, holders: Sequence[int]) -> int:
        chosen = min(holders, key=lambda rank: (turns[rank], rank))
        turns[chosen] += 1
        return chosen

    return receiver


def assemble(
    group: Group, shards: Mapping[str, LocalShard], receiver: Receiver = to_all
) -> Tensors:
    """Return the full tensors that this process receives, by name. Collective; `receiver` must
    return the same on all processes."""
    described = all_gather_object(group, {name: _describe(shard) for name, shard in shards.items()})
    found: Tensors = {}
    for name in dict.fromkeys(name for theirs in described for name in theirs):
        holders = [rank for rank, theirs in enumerate(described) if name in theirs]
        shape, dtype, _, is_full = described[holders[0]][name]
        counting = [rank for rank in holders if described[rank][name][2]] or holders
        if is_full:
            counting = counting[:1]
        to = receiver(name, holders)
        if is_full and to in holders:  # the receiver has it
            if to == group.rank:
                found[name] = shards[name].tensor.detach()
            continue
        if is_full and len(holders) == group.size:
            found[name] = shards[name].tensor.detach()
            continue
        full = torch.zeros(shape, dtype=getattr(torch, dtype))
        if group.rank in counting:
            shards[name].spec.put(full, shards[name].tensor.detach())
        if to is None:
            group.all_reduce(_bits(full), "sum")
        else:
            group.reduce(_bits(full), to, "sum")
        if to in (None, group.rank):
            found[name] = full
    return found


def _describe(shard: LocalShard) -> list[Any]:
    dtype = str(shard.tensor.dtype).removeprefix("torch.")
    return [list(shard.spec.shape), dtype, shard.is_counted, not shard.spec.slices]


def _bits(full: torch.Tensor) -> torch.Tensor:
    return full.view(-1).view(_INTEGERS.get(full.element_size(), torch.uint8))
