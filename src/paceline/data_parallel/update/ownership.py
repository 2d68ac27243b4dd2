"""Which worker updates which elements of the parameters when the update is sharded.

The parameters, one after the other, are cut into as many equal ranges as there are workers on the
host. A SHARD is what a range has of one parameter: all of it, or, at the two ends of a range, a
part. An optimizer that treats every element by itself gives the same result for shards; other
optimizers (those that need norms or matrices) get complete parameters, and the ranges are as even
as that allows.

Plain arithmetic; every worker computes the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.ps.placement import ELEMENTWISE

_LINE_ELEMENTS = 16  # cuts fall on cache lines: two workers never write to the same one


@dataclass(frozen=True)
class ShardRange:
    """Elements `start` to `stop` of parameter number `index`, updated by worker `owner`."""

    index: int
    start: int
    stop: int
    owner: int


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to treat every element of a parameter by itself."""
    return any(type(optimizer) is getattr(torch.optim, name, None) for name in ELEMENTWISE)


def cut_anywhere(sizes: Sequence[int], num_workers: int) -> list[ShardRange]:
    """Return equal ranges of parameters of those sizes, cut on cache lines."""
    total = sum(-(-size // _LINE_ELEMENTS) for size in sizes)  # in lines
    ranges: list[ShardRange] = []
    first = 0
    for index, size in enumerate(sizes):
        lines = -(-size // _LINE_ELEMENTS)
        for owner in range(num_workers):
            low = max(total * owner // num_workers - first, 0)
            high = min(total * (owner + 1) // num_workers - first, lines)
            if low < high:
                stop = min(high * _LINE_ELEMENTS, size)
                ranges.append(ShardRange(index, low * _LINE_ELEMENTS, stop, owner))
        if size == 0:
            ranges.append(ShardRange(index, 0, 0, 0))
        first += lines
    return ranges


def cut_at_borders(sizes: Sequence[int], num_workers: int) -> list[ShardRange]:
    """Return complete parameters, each for the worker that has the fewest elements so far."""
    loads = [0] * num_workers
    owners: dict[int, int] = {}
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = min(range(num_workers), key=lambda worker: (loads[worker], worker))
        loads[owners[index]] += sizes[index]
    return [ShardRange(index, 0, size, owners[index]) for index, size in enumerate(sizes)]
