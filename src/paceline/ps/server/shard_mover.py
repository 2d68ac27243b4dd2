"""ShardMover: moves a table into memory that workers map, while it serves.

A copy that was filled from another server has private memory, because that is there at once
(handlers.py, `host_copy`). When it serves workers that map memory of their host, its shards move
one after the other: a helper thread allocates, which takes long, and the loop copies one shard in a
turn. Until all have moved, values are copied to the workers.

Threads: the loop's, and one helper.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from paceline import _core
from paceline.errors import SharedMemoryError
from paceline.ps import messages as m
from paceline.ps.server.exposed_memory import allocate_exposed, can_expose, place_of
from paceline.ps.server.table_requests import ServedTable


class ShardMover:
    """Moves the shards of one table."""

    def __init__(
        self, engine: _core.Engine, rank: int, served: ServedTable, log: Callable[[str], None]
    ) -> None:
        """`rank`: of this process."""
        self.served = served
        self.is_over = False
        self._engine, self._rank, self._log = engine, rank, log
        self._places: list[m.SharedMemory] = []
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="paceline-move")
        self._block: Future[tuple[torch.Tensor, torch.Tensor]] | None = None

    def advance(self) -> None:
        """Move the next shard, if there is memory for it by now."""
        shards = self.served.table.shards
        if self._block is None and len(self._places) < len(shards):
            spec = shards[len(self._places)].spec
            self._block = self._helper.submit(allocate_exposed, self._engine, spec)
        if self._block is not None and self._block.done():
            self._take(self._block)
        if len(self._places) == len(shards) and not self.is_over:
            self.served.buffers.exposed = self._places
            self.stop()

    def stop(self) -> None:
        """End: everything has moved, or this copy does not serve any more."""
        self.is_over = True
        self._helper.shutdown(wait=False)

    def _take(self, block: Future[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._block = None
        try:
            params, average = block.result()
        except SharedMemoryError as error:
            name = self.served.table.spec.name
            self._log(f"copies the values of table {name!r} to its workers from now on: {error}")
            self.stop()
            return
        self.served.table.shards[len(self._places)].move(params, average)
        self._places.append(place_of(self._engine, self._rank, params, average))


def has_to_move(served: ServedTable) -> bool:
    """Return whether workers would map this table's memory, but cannot."""
    buffers = served.buffers
    if buffers.exposed or not any(opened.maps for opened in buffers.opened.values()):
        return False
    return can_expose(served.table.spec)
