"""An array on the servers: what workers have to agree on, and which server has what of it.

Large arrays are cut into a part for each server. Small ones lie whole on one server, which follows
from the name, so that many of them spread evenly. Plain arithmetic; every rank computes the same.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace

from paceline.ps.placement import ELEMENTWISE, Part, place
from paceline.ps.seats import dtype_of
from paceline.ps.spec import OptimizerSpec, Piece, Rule, ShardSpec, TableSpec


@dataclass(frozen=True)
class ArraySpec:
    """What workers have to agree on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    workers: tuple[int, ...]  # those who push
    optimizer: OptimizerSpec
    rule: Rule

    def on_one_server(self, part: Part) -> TableSpec:
        count = part.stop - part.start
        shape = self.shape if count == math.prod(self.shape) else (count,)
        piece = Piece(self.name, 0, 0, 0, count, shape)
        shard = ShardSpec(f"[{part.start}:{part.stop}]", self.dtype, count, (piece,))
        return TableSpec(
            self.name, self.workers, (shard,), self.optimizer, self.rule, shape=self.shape
        )

    def parts(self, num_servers: int) -> list[Part]:
        """Say which server has what; the first part is at home."""
        size, itemsize = math.prod(self.shape), dtype_of(self.dtype).itemsize
        can_cut = self.rule.push != "grad" or self.optimizer.name in ELEMENTWISE
        cuts: list[list[int]] | None = None if can_cut else [[]]
        parts = place([size], num_servers, itemsizes=[itemsize], cuts=cuts)
        first = home_of(self.name, num_servers)
        return [replace(part, server=(part.server + first) % num_servers) for part in parts]


def home_of(name: str, num_servers: int) -> int:
    """Return the server that has the beginning of an array."""
    return zlib.crc32(name.encode()) % num_servers
