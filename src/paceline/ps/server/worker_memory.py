"""The workers' buffers for a table: where gradients are read, and fresh values are written.

Each worker has a BUFFER per shard for fresh values and averages. Buffers of this host are read and
written in place; other workers get copies that follow replies. A worker that MAPS the server's own
memory (exposed_memory.py) gets no copies: the reply names the place. A backup does all that the
primary does, except that it delivers no values to workers (`delivers_values`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from paceline import _core
from paceline.comm.shared_memory import allocate
from paceline.errors import UsageError
from paceline.ps import messages as m
from paceline.ps.connection import Landing
from paceline.ps.packing import Unpacking, unpack
from paceline.ps.server.precision import FLOATING
from paceline.ps.server.table import Table
from paceline.ps.spec import ShardSpec


@dataclass(eq=False)
class Caller:
    """The worker that made a request."""

    rank: int  # of its process, which has the memory and sends the requests
    worker: int  # its number, by which tables know it
    is_here: bool  # it is on this host: its memory can be seen


class Delivery(NamedTuple):
    """What a worker gets with a reply."""

    tensors: Sequence[torch.Tensor] = ()  # that follow it
    places: tuple[m.Where, ...] = ()  # where the worker sees it in this server's memory


NOTHING = Delivery()
Tensorful: TypeAlias = m.Assign | m.Push | m.Replace  # requests with a tensor


@dataclass
class WorkerBuffers:
    """One table, and its workers' buffers."""

    table: Table
    engine: _core.Engine
    is_shared: bool  # all workers of this host share the memory of the shards
    delivers_values: bool = True  # to workers; a backup does not
    exposed: Sequence[m.SharedMemory] = ()  # by shard: memory that workers may map; empty: none
    opened: dict[int, m.Open] = field(default_factory=dict)  # by worker: its buffers
    delivered: dict[int, Collection[int]] = field(
        default_factory=dict
    )  # by worker: since its commit
    # By use, worker and shard: a worker's memory as it was last seen.
    views: dict[tuple[str, int, int], tuple[m.Where, torch.dtype, torch.Tensor]] = field(
        default_factory=dict
    )
    _unpacking: Unpacking = field(default_factory=Unpacking)
    _staging: dict[tuple[str, int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def spec_of(self, shard: int) -> ShardSpec:
        """Return the spec of a shard."""
        shards = self.table.spec.shards
        if not 0 <= shard < len(shards):
            raise UsageError(
                f"table {self.table.spec.name!r} has {len(shards)} shards here, not {shard + 1}"
            )
        return shards[shard]

    def assign(self, shard: int, values: torch.Tensor, params: Sequence[int]) -> None:
        """Set a shard's values, or only those of some parameters."""
        if params:
            merged = torch.empty_like(values)
            self.table.shards[shard].copy_to(merged)
            for piece in self.spec_of(shard).pieces:
                if piece.param in params:
                    merged[piece.start :][: piece.count] = values[piece.start :][: piece.count]
            values = merged
        self.table.assign(shard, values)

    def register(self, caller: Caller, opened: m.Open) -> None:
        """Register the buffers of a worker."""
        self._require_places(opened.buffers)
        for number, (buffer, spec) in enumerate(
            zip(opened.buffers, self.table.spec.shards, strict=True)
        ):
            wire_dtype(opened, spec.dtype)
            for use, where in (("params", buffer.params), ("average", buffer.average)):
                if where is not None and caller.is_here:
                    self.view(use, caller, number, where, dtype_of(spec.dtype))
        self.opened[caller.worker] = opened

    def landing(self, caller: Caller, request: Tensorful, *, is_sent: bool) -> Landing:
        """Return where the tensor of a request is, or is to be received if it is sent."""
        spec = self.spec_of(request.shard)
        if isinstance(request, m.Push) and request.codec:
            return Landing([self._packet(caller, request, is_sent)], is_sent or not request.where)
        dtype = dtype_of(request.dtype if isinstance(request, m.Push) else spec.dtype)
        use = "push" if isinstance(request, m.Push) else "replace"
        if request.where is not None and not is_sent:
            return Landing([self.view(use, caller, request.shard, request.where, dtype)])
        if isinstance(request, m.Assign):  # rare, and the staging memory may hold a push
            return Landing([torch.empty(spec.count, dtype=dtype)], follow=True)
        return Landing([self.staging("push", caller.worker, request.shard, dtype)], follow=True)

    def _packet(self, caller: Caller, push: m.Push, is_sent: bool) -> torch.Tensor:
        """Return where the packet of a push is, or is to be received if it is sent."""
        contents = self._unpacking.contents(push.shard, self.spec_of(push.shard), push)
        words = contents.num_bytes // 4  # so that it begins where a number may
        if push.where is not None and not is_sent:
            seen = self.view("packet", caller, push.shard, push.where, torch.float32, words)
        else:
            seen = self.staging("packet", caller.worker, push.shard, torch.float32, words)
        return seen.view(torch.uint8)

    def unpack(self, caller: Caller, push: m.Push, payload: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a packet, in this server's own memory."""
        spec = self.spec_of(push.shard)
        out = self.staging("push", caller.worker, push.shard, torch.float32)
        return unpack(self._unpacking.contents(push.shard, spec, push), spec, push, payload, out)

    def view(
        self,
        use: str,
        caller: Caller,
        shard: int,
        where: m.Where,
        dtype: torch.dtype,
        count: int | None = None,
    ) -> torch.Tensor:
        """Return a worker's memory for a shard, on this host, as a flat tensor.

        It is kept for the next request, which usually names the same memory. It may outlive the
        worker, which may be lost before a backup has applied its requests.
        """
        key = (use, caller.worker, shard)
        known = self.views.get(key)
        count = self.table.spec.shards[shard].count if count is None else count
        if known is not None and known[:2] == (where, dtype) and known[2].numel() == count:
            return known[2]
        seen = view(self.engine, caller.rank, where, count, dtype)
        self.views[key] = (where, dtype, seen)
        return seen

    def staging(
        self, use: str, worker: int, shard: int, dtype: torch.dtype, count: int | None = None
    ) -> torch.Tensor:
        """Return this server's own memory for one worker and shard; always the same."""
        key = (use, worker, shard, dtype)
        count = self.table.spec.shards[shard].count if count is None else count
        if key not in self._staging or self._staging[key].numel() != count:
            self._staging[key] = allocate(self.engine, (count,), dtype)
        return self._staging[key]

    def average_for(self, caller: Caller, shard: int) -> tuple[Delivery, str]:
        """Deliver an average to a worker; return what goes with the reply, and its codec."""
        opened = self._opened(caller.worker)
        if self.is_shared or not opened.wants_average or not self.delivers_values:
            return NOTHING, ""
        if self._maps(caller):
            return Delivery(places=(self.exposed[shard].average,)), ""
        average, where = self.table.shards[shard].average, opened.buffers[shard].average
        assert average is not None
        if where is not None and caller.is_here:
            self.view("average", caller, shard, where, average.dtype).copy_(average)
            return NOTHING, ""
        packed = self.table.shards[shard].packet()
        if packed is not None:
            return Delivery((packed[1],)), packed[0]
        return Delivery((self._on_the_wire("average", caller.worker, shard, average),)), ""

    def values_for(self, caller: Caller, into: Sequence[m.Where] = ()) -> Delivery:
        """Deliver all values to a worker; return what goes with the reply."""
        worker, is_mapped = caller.worker, self._maps(caller)
        wheres, following = self._wheres(caller, into), list[torch.Tensor]()
        delivered = self.delivered.pop(worker, ())
        for number in reversed(
            range(len(self.table.shards))
        ):  # the first layers are in the last shards
            if self.is_shared or is_mapped or not self.delivers_values:
                self.table.read(worker, number, None)
                continue
            out = self._place_for(caller, number, wheres[number])
            self.table.read(worker, number, None if number in delivered else out)
            if wheres[number] is None:
                following.append(out)
        return Delivery(following, self._places() if is_mapped else ())

    def _maps(self, caller: Caller) -> bool:
        """Return whether a worker sees this copy's values in its memory, and not a copy of them."""
        is_seen = bool(self.exposed) and caller.is_here and self.delivers_values
        return is_seen and self._opened(caller.worker).maps

    def _places(self) -> tuple[m.Where, ...]:
        return tuple(memory.params for memory in self.exposed)

    def commit(self, caller: Caller, request: m.Commit) -> None:
        """End a worker's step; fresh values are delivered during the update if it may read them."""
        wheres = self._wheres(caller, request.into)

        def place(number: int) -> torch.Tensor:
            return self._place_for(caller, number, wheres[number])

        is_copied = not (self.is_shared or self._maps(caller)) and self.delivers_values
        outs = place if request.reads and is_copied else None
        self.delivered[caller.worker] = self.table.commit(
            caller.worker, request.clock, request.settings, outs, stops=request.stops
        )

    def _wheres(self, caller: Caller, into: Sequence[m.Where]) -> Sequence[m.Where | None]:
        """Return where a worker wants the values of each shard; None: they are sent to it."""
        buffers = self._opened(caller.worker).buffers
        wheres: Sequence[m.Where | None] = into or [buffer.params for buffer in buffers]
        self._require_places(wheres)
        return wheres if caller.is_here else [None] * len(wheres)

    def _place_for(self, caller: Caller, number: int, where: m.Where | None) -> torch.Tensor:
        """Return where a shard's values are written for a worker: its memory, or the server's."""
        spec = self.table.spec.shards[number]
        if where is not None:
            return self.view("params", caller, number, where, dtype_of(spec.dtype))
        dtype = wire_dtype(self._opened(caller.worker), spec.dtype)
        return self.staging("params", caller.worker, number, dtype)

    def look(self, caller: Caller, into: Sequence[m.Where]) -> Delivery:
        """Deliver all values to a process that only reads; return what goes with the reply."""
        following = []
        if into:
            self._require_places(into)
        for number in reversed(range(len(self.table.shards))):
            shard, spec = self.table.shards[number], self.table.spec.shards[number]
            shard.require_values()
            if not self.delivers_values:
                continue
            if into and caller.is_here:
                out = self.view("peek", caller, number, into[number], dtype_of(spec.dtype))
            else:
                out = self.staging("peek", caller.worker, number, dtype_of(spec.dtype))
                following.append(out)
            shard.copy_to(out)
        return Delivery(following)

    def _opened(self, worker: int) -> m.Open:
        if worker not in self.opened:
            raise UsageError(
                f"worker {worker} has not opened table {self.table.spec.name!r}: open it first"
            )
        return self.opened[worker]

    def _require_places(self, wheres: Sequence[m.Where | m.WorkerBuffer | None]) -> None:
        if len(wheres) != len(self.table.shards):
            raise UsageError(
                f"table {self.table.spec.name!r} has {len(self.table.shards)} shards here, but the"
                f" request has buffers for {len(wheres)}"
            )

    def _on_the_wire(self, use: str, worker: int, shard: int, values: torch.Tensor) -> torch.Tensor:
        dtype = wire_dtype(self.opened[worker], self.table.spec.shards[shard].dtype)
        return self.staging(use, worker, shard, dtype).copy_(values)

    def forget(self, worker: int) -> None:
        """Drop the memory of a worker that has left."""
        self.delivered.pop(worker, None)
        self._staging = {key: value for key, value in self._staging.items() if key[1] != worker}
        self.views = {key: value for key, value in self.views.items() if key[1] != worker}


def wire_dtype(opened: m.Open, dtype: str) -> torch.dtype:
    """Return the dtype in which a worker's tensors travel between hosts."""
    return dtype_of(opened.wire or dtype)


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of that name; UsageError if servers cannot hold it."""
    if name not in FLOATING:
        raise UsageError(f"dtype {name[:40]!r} cannot be on a server; one of {', '.join(FLOATING)}")
    return FLOATING[name]


def view(
    engine: _core.Engine, rank: int, where: m.Where, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return memory of a worker of this host as a flat tensor."""
    if where.rank != rank or where.offset % dtype.itemsize:
        raise UsageError(
            f"rank {rank} names offset {where.offset} in the memory of rank {where.rank}; it must"
            f" be its own memory, and the offset a multiple of the size of {dtype}"
        )
    size = count * dtype.itemsize
    memory: Any = engine.memory_of_peer(where.rank, where.segment, where.offset, size)
    flat: torch.Tensor = torch.from_numpy(memory).view(dtype)
    return flat
