"""ExposedMemory: the shards of a table in engine memory that the workers of this host map.

A worker sees values and averages there, so nothing is copied to it. Its mapping outlives this
process, and memory that this process has freed: nothing here is used for anything else afterwards.
So what a worker sees of a server that is lost, or has handed a partition over, does not change
until the worker maps the memory of the next one.
"""

from __future__ import annotations

import torch

from paceline import _core
from paceline.comm.shared_memory import allocate
from paceline.ps import messages as m
from paceline.ps.server.checks import check_table
from paceline.ps.server.precision import FLOATING, kept_dtype
from paceline.ps.spec import ShardSpec, TableSpec

_PAGE_BYTES = 4096


def can_expose(spec: TableSpec) -> bool:
    """Return whether workers may see a table's memory: they take steps together, so nothing changes
    there while they compute, and servers keep the values in the dtype of the workers."""
    check_table(spec)
    rule = spec.rule
    dtypes = [FLOATING[shard.dtype] for shard in spec.shards]
    return rule.is_lockstep and all(kept_dtype(d, rule.server_dtype) is d for d in dtypes)


class ExposedMemory:
    """The memory of one table's shards: the values and the average of a shard are neighbours."""

    def __init__(self, engine: _core.Engine, rank: int, spec: TableSpec) -> None:
        """`rank`: of this process."""
        self._blocks = [allocate_exposed(engine, shard) for shard in spec.shards]
        self.places = [place_of(engine, rank, *block) for block in self._blocks]  # by shard

    def allocate(self, shard: int, use: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a shard for one use: "params" or "average"."""
        params, average = self._blocks[shard]
        return (params if use == "params" else average).view(dtype)


def allocate_exposed(engine: _core.Engine, spec: ShardSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the values and the average of a shard, in the dtype of the workers."""
    dtype = FLOATING[spec.dtype]
    size = spec.count * dtype.itemsize
    start = -(-size // _PAGE_BYTES) * _PAGE_BYTES
    block = allocate(engine, (start + size,), torch.uint8, apart=True)
    return block[:size].view(dtype), block[start:].view(dtype)


def place_of(
    engine: _core.Engine, rank: int, params: torch.Tensor, average: torch.Tensor
) -> m.SharedMemory:
    """Return where the values and the average of a shard are."""

    def place(flat: torch.Tensor) -> m.Where:
        where = engine.locate(flat.data_ptr(), flat.nbytes) if flat.numel() else (0, 0)
        return m.Where(rank, *where)

    return m.SharedMemory(place(params), place(average))
