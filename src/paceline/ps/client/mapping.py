"""What a worker sees of a table: memory of the servers of its host, or its own.

On one host a server that exposes its memory (ps/server/exposed_memory.py) copies nothing to its
workers: a reply names the place of what it answers, and the worker maps it privately, where its
script looks. A reply without a place means that values were delivered to this worker's own memory.
So what the script sees changes with the replies, and never before one of them: until a reply of the
server that takes over, it is the memory of the last one, also when that server is lost.

A place that cannot be mapped belongs to a server that is gone, and was forgotten. Then the request
is sent again, to the next server.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.comm.shared_memory import HostTensor
from paceline.errors import PeerLost, UsageError
from paceline.ps import messages as m
from paceline.ps.client.items import Item, RemoteShard

_PAGE_BYTES = 4096
_ANNOUNCED_S = 0.5  # until a server's new memory is known here, at the latest


class MappedTable:
    """The shards of one table, as this worker sees them."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self._shown: dict[tuple[str, int, int], m.Where] = {}  # by use, item, first element

    @property
    def servers(self) -> set[int]:
        """The ranks of the servers whose memory this worker sees now."""
        return {where.rank for where in self._shown.values()}

    def show_average(self, shard: RemoteShard, reply: m.Reply) -> None:
        """Show the average that a reply is about."""
        self._show("average", shard, reply.places[0] if reply.places else None)

    def show_params(self, shards: Sequence[RemoteShard], reply: m.Reply) -> None:
        """Show the values that a reply is about, of all shards on its server."""
        for shard in shards:
            self._show("params", shard, reply.places[shard.number] if reply.places else None)

    def _show(self, use: str, shard: RemoteShard, where: m.Where | None) -> None:
        part = shard.part
        key = (use, part.item, part.start)
        if self._shown.get(key) == where or part.start == part.stop:
            return
        views = self._items[part.item].views
        assert views is not None, "only these tables are opened with `maps`"
        view = views[0] if use == "params" else views[1]
        size = view.shared.element_size()
        _show(view, part.start * size, part.stop * size, where)
        if where is None:
            del self._shown[key]
        else:
            self._shown[key] = where


def can_map(items: Sequence[Item], shards: Sequence[RemoteShard]) -> bool:
    """Return whether a worker can map each of these shards: they begin and end on pages."""
    for shard in shards:
        item, part = items[shard.part.item], shard.part
        size = item.params.element_size()
        is_end = part.stop == item.params.numel()
        if item.views is None or part.start * size % _PAGE_BYTES:
            return False
        if part.stop * size % _PAGE_BYTES and not is_end:
            return False
    return True


def _show(view: HostTensor, start: int, stop: int, where: m.Where | None) -> None:
    place = None if where is None else (where.rank, where.segment, where.offset)
    deadline_s = time.monotonic() + _ANNOUNCED_S
    while True:
        try:
            view.show(start, stop, place)
            return
        except UsageError as error:  # that memory is not known here: not yet, or not any more
            if where is None:
                raise
            if time.monotonic() > deadline_s:
                raise PeerLost(str(error), rank=where.rank) from error
        time.sleep(0.002)
