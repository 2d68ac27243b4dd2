"""The table of a key: one array on the servers, as a worker or a reader asks for it.

Large arrays are cut into a part for each server; small ones lie on one server, which follows from
the name, so that many of them spread evenly. The server that has the beginning is the array's FIRST
server: the first worker to create it there gives all values.

Tensors in these calls are flat and complete; those that servers of this host read or write must lie
in engine memory. Nothing here waits except where it says so.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import UnknownKey, UsageError
from paceline.ps import messages as m
from paceline.ps.client.items import Item, ItemParam, RemoteShard
from paceline.ps.client.link import ServerLink
from paceline.ps.client.remote_table import RemoteTable
from paceline.ps.client.session import ClientSession
from paceline.ps.placement import ELEMENTWISE
from paceline.ps.server.checks import check_table
from paceline.ps.server.worker_memory import dtype_of
from paceline.ps.spec import OptimizerSpec, Rule
from paceline.runtime.work import Work

_SHOWN = 8

MakeRead = Callable[[int, int, tuple[m.Where, ...]], m.AnyRequest]  # number, table, into


@dataclass(frozen=True)
class ArraySpec:
    """What workers have to agree on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    workers: tuple[int, ...]  # those that push
    optimizer: OptimizerSpec
    rule: Rule

    def item(self) -> Item:
        """Return the array as an item of a table; its memory is named with each request."""
        count = math.prod(self.shape)
        flat = torch.empty(count, dtype=dtype_of(self.dtype), device="meta")
        param = ItemParam(self.name, 0, 0, count, self.shape)
        return Item("", [param], flat, flat, is_shared=True, first_sign=None)


def first_server(name: str, num_servers: int) -> int:
    """Return the server that has the beginning of an array."""
    return zlib.crc32(name.encode()) % num_servers


class RemoteArray(RemoteTable):
    """Asks the servers about one array. Calls that change it are made one at a time."""

    def __init__(self, session: ClientSession, spec: ArraySpec) -> None:
        links = session.links
        super().__init__(
            links,
            spec.workers,
            spec.name,
            [spec.item()],
            spec.optimizer,
            spec.rule,
            cut_anywhere=spec.rule.push != "grad" or spec.optimizer.name in ELEMENTWISE,
            first_server=first_server(spec.name, len(links)),
            shape=spec.shape,
        )
        for table in self.specs.values():
            check_table(table)
        self.spec, self.name = spec, f"key {spec.name!r}"
        self._session = session
        (self.array_shards,) = self._shards  # in order, beginning on the first server
        self.starts = [shard.part.start for shard in self.array_shards]
        self.needs_engine_memory = any(shard.link.uses_engine_memory for shard in self.array_shards)

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        """Whether this process has left the job."""
        return self._session.is_over

    def create(self, values: Callable[[], torch.Tensor]) -> bool:
        """Create the array, or join it; True when it was created, from `values()`. Blocks."""
        first, *others = self.array_shards
        reply = self._open_on(first.link.index)
        clocks = [reply.clock]
        if not reply.is_new:
            _wait_for_values(first.link, reply.table)  # the other servers have theirs by then
        clocks += [self._open_on(shard.link.index).clock for shard in others]
        if reply.is_new:
            flat = values()
            for shard in (*others, first):
                self._assign(shard, flat).wait()
        self.clock = min(clocks)  # if this worker replaces another one, it is not 0
        return reply.is_new

    def find(self) -> None:
        """Learn the table's numbers on the servers; another worker has created it. Blocks."""
        for shard in self.array_shards:
            reply = shard.link.ask(lambda seq: m.Find(seq, self.spec.name)).wait()
            self._numbers[shard.link.index] = reply.table

    # -- updates and reads --------------------------------------------------------------------

    def push_array(self, grad: torch.Tensor, settings: dict[str, Any] | None) -> list[Work[Any]]:
        """Push an update, which counts at once. Results that are replies say how it ended."""
        return self._push(grad, settings, None)

    def push_pull(
        self, grad: torch.Tensor, settings: dict[str, Any] | None, out: torch.Tensor
    ) -> list[Work[Any]]:
        """Push an update; the replies bring values, when the rule allows."""
        if not self.rule.takes_turns:
            return self._push(grad, settings, out)
        works = self.push_array(grad, settings)
        for work in works:
            work.wait()
        return [*works, *self.pull_array(out)]

    def pull_array(self, out: torch.Tensor) -> list[Work[Any]]:
        """Read when the clocks let this worker. With turns: blocks until they have."""
        works = []
        for shard in self.array_shards:
            works.append(
                self._read_shard(
                    shard, out, lambda seq, n, into: m.Pull(seq, n, in_turn=True, into=into)
                )
            )
            if self.rule.takes_turns:
                works[-1].wait()
        return works

    def peek(self, out: torch.Tensor) -> list[Work[Any]]:
        """Read now, without a clock."""
        return [self._read_shard(shard, out, m.Peek) for shard in self.array_shards]

    def _push(
        self, grad: torch.Tensor, settings: dict[str, Any] | None, out: torch.Tensor | None
    ) -> list[Work[Any]]:
        changed, reads = None if settings is None else (settings,), out is not None
        clock, works = self.clock + 1, list[Work[Any]]()

        def commit(seq: int, table: int, into: tuple[m.Where, ...]) -> m.Commit:
            return m.Commit(seq, table, clock, changed, reads, into)

        for shard in self.array_shards:
            pushed = self._push_plain(shard, grad, None)
            # No worker wants the average, but a refusal comes with it.
            works += [_without_result(one) for one in pushed] if self.rule.aggregate else pushed
            works.append(self._read_shard(shard, out, commit))
        self.clock = clock
        return works

    def _read_shard(
        self, shard: RemoteShard, out: torch.Tensor | None, make: MakeRead
    ) -> Work[m.Reply]:
        """Ask for a shard's values in its part of a tensor; None: only for a reply."""
        table, target = self._numbers[shard.link.index], None if out is None else shard.of(out)

        def locate(seq: int) -> m.AnyRequest:
            where = None if target is None else shard.link.locate(target)
            return make(seq, table, () if where is None else (where,))

        return shard.link.ask(locate, into=lambda _: () if target is None else (target,))

    def versions(self) -> list[int]:
        """Return the version of every part. Blocks until all have values."""
        return [work.wait().version for work in self.follow(-1)]


def _without_result(work: Work[Any]) -> Work[None]:
    def finish() -> None:
        work.wait()

    return Work(work.handle, finish, work)


def known_keys(session: ClientSession) -> list[str]:
    """Return the names of all arrays on all servers. Blocks."""
    works = [link.ask(m.Keys) for link in session.links]
    return sorted({key for work in works for key in work.wait().keys})


def find(session: ClientSession, name: str) -> RemoteArray:
    """Return an array that another worker has created; UnknownKey if none has. Blocks."""
    first = session.links[first_server(name, len(session.links))]
    try:
        reply = first.ask(lambda seq: m.Find(seq, name)).wait()
    except UnknownKey:
        reply = m.Reply(0)
    there = reply.spec
    if there is None or there.shape is None:
        raise _unknown(session, name)
    _wait_for_values(first, reply.table)
    dtype = there.shards[0].dtype
    spec = ArraySpec(name, there.shape, dtype, there.workers, there.optimizer, there.rule)
    array = RemoteArray(session, spec)
    array.find()
    return array


def _unknown(session: ClientSession, name: str) -> UsageError:
    keys = known_keys(session)
    shown = ", ".join(map(repr, keys[:_SHOWN])) + (", ..." if len(keys) > _SHOWN else "")
    return UnknownKey(
        f"rank {session.rank}: no server has a key {name!r}; known keys: {shown or 'none'}."
        " init() creates one; a rank that only reads a key waits until its workers have called it"
    )


def _wait_for_values(link: ServerLink, table: int) -> None:
    link.ask(lambda seq: m.Follow(seq, table, -1)).wait()
