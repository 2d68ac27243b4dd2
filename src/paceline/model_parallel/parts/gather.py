"""The whole of what the processes of a unit hold in parts.

Each process writes its part into zeros, and these are added bit by bit: as integers, so that not
even the sign of a zero changes. One tensor at a time, so that no process needs memory for more than
it is to have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object
from paceline.model_parallel.parts.layout import Part

Tensors = dict[str, torch.Tensor]
# Who is to have a tensor, by its name and the ranks of those who hold something of it; None: all.
Receiver = Callable[[str, Sequence[int]], int | None]
_INTEGERS = {4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Piece:
    """What a process has of one tensor of the whole model."""

    tensor: torch.Tensor
    part: Part
    counts: bool = True


def to_all(_name: str, _holders: Sequence[int]) -> None:
    """Let every process have every tensor."""


def assemble(
    group: Group, pieces: Mapping[str, Piece], receiver: Receiver = to_all
) -> tuple[Tensors, list[str]]:
    """Return the whole tensors that this process is to have, by name, and the names of all there
    are. Collective; `receiver` answers the same on all processes."""
    told = all_gather_object(group, {name: _facts(piece) for name, piece in pieces.items()})
    names = list(dict.fromkeys(name for facts in told for name in facts))
    found: Tensors = {}
    for name in names:
        holders = [rank for rank, facts in enumerate(told) if name in facts]
        shape, dtype, _, is_whole = told[holders[0]][name]
        counting = [rank for rank in holders if told[rank][name][2]] or holders
        if is_whole:
            counting = counting[:1]
        to = receiver(name, holders)
        if is_whole and to in holders:  # who is to have it has it
            if to == group.rank:
                found[name] = pieces[name].tensor.detach()
            continue
        if is_whole and len(holders) == group.size:
            found[name] = pieces[name].tensor.detach()
            continue
        whole = torch.zeros(shape, dtype=getattr(torch, dtype))
        if group.rank in counting:
            pieces[name].part.put(whole, pieces[name].tensor.detach())
        if to is None:
            group.all_reduce(_bits(whole), "sum")
        else:
            group.reduce(_bits(whole), to, "sum")
        if to in (None, group.rank):
            found[name] = whole
    return found, names


def spread(size: int) -> Receiver:
    """Let each tensor be had by one of those who hold something of it, in turns."""
    turns = [0] * size

    def receiver(_name: str, holders: Sequence[int]) -> int:
        chosen = min(holders, key=lambda rank: (turns[rank], rank))
        turns[chosen] += 1
        return chosen

    return receiver


def _facts(piece: Piece) -> list[Any]:
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    return [list(piece.part.shape), dtype, piece.counts, not piece.part.slices]


def _bits(whole: torch.Tensor) -> torch.Tensor:
    return whole.view(-1).view(_INTEGERS.get(whole.element_size(), torch.uint8))
