"""One array on the servers, as a worker or a reader asks for it.

The array is a table of its own. Large arrays are cut into a part for each server; small ones lie
whole on one server, which follows from the name, so that many of them spread evenly. The server
that has the beginning is the array's HOME: whoever makes it there first gives all values.

Tensors in these calls are flat and complete; those that servers of this host read or write must lie
in engine memory. Nothing here waits except where it says so.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.errors import UnknownKey, UsageError
from paceline.ps import messages as m
from paceline.ps import placement
from paceline.ps.client.connection import Connection
from paceline.ps.client.link import ServerLink
from paceline.ps.placement import ELEMENTWISE, Part
from paceline.ps.server.worker_memory import dtype_of
from paceline.ps.spec import OptimizerSpec, Piece, Rule, ShardSpec, TableSpec
from paceline.runtime.work import Work


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
        parts = placement.place([size], num_servers, itemsizes=[itemsize], cuts=cuts)
        first = home_of(self.name, num_servers)
        return [replace(part, server=(part.server + first) % num_servers) for part in parts]


def home_of(name: str, num_servers: int) -> int:
    """Return the server that has the beginning of an array."""
    return zlib.crc32(name.encode()) % num_servers


_SHOWN = 8


@dataclass
class _Place:
    link: ServerLink
    part: Part
    table: int = -1  # number of the table there

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.part.start : self.part.stop]

    def locate(self, flat: torch.Tensor) -> tuple[m.Where, ...]:
        """Say where its part of a tensor lies; nothing if the server is on another host."""
        where = self.link.locate(self.of(flat))
        return () if where is None else (where,)

    def following(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """What has to follow a request about this part: nothing on one host."""
        return () if self.link.is_local else (part,)


class RemoteArray:
    """Asks the servers about one array. Calls that change it are made one at a time."""

    def __init__(self, connection: Connection, spec: ArraySpec) -> None:
        self.spec = spec
        self.name = f"key {spec.name!r}"
        self.clock = 0  # updates that this worker has pushed
        self._clocks: list[int] = []  # the same, as the servers told it
        self._connection = connection
        links = connection.links
        self._places = [_Place(links[part.server], part) for part in spec.parts(len(links))]
        self.needs_engine_memory = any(place.link.uses_engine_memory for place in self._places)

    @property
    def is_over(self) -> bool:
        """Whether this process has left the job."""
        return self._connection.is_over

    @property
    def starts(self) -> list[int]:
        """The elements at which parts begin."""
        return [place.part.start for place in self._places]

    # -- making and finding -------------------------------------------------------------------

    def open(self, values: Callable[[], torch.Tensor]) -> bool:
        """Make the array, or join it; True when it was made, from `values()`. Blocks."""
        home, *others = self._places
        self._clocks.clear()
        is_maker = self._open(home)
        if not is_maker:
            _wait_for_values(home.link, home.table)  # the others have theirs by then
        for place in others:
            self._open(place)
        if is_maker:
            flat = values()
            for place in (*others, home):
                self._assign(place, flat).wait()
        self.clock = min(self._clocks)  # of a place that this worker took over, it is not 0
        return is_maker

    def find(self) -> None:
        """Learn the array's numbers on the servers; another worker has made it. Blocks."""
        for place in self._places:
            reply = place.link.ask(lambda seq: m.Find(seq, self.spec.name)).wait()
            place.table = reply.table

    def _open(self, place: _Place) -> bool:
        spec = self.spec.on_one_server(place.part)
        reply = place.link.ask(lambda seq: m.Open(seq, spec, (m.Seat(),))).wait()
        place.table = reply.table
        self._clocks.append(reply.clock)
        place.link.holds.append(f"{self.spec.name} {spec.shards[0].label}")
        return reply.is_new

    def _assign(self, place: _Place, flat: torch.Tensor) -> Work[m.Reply]:
        values = place.of(flat)
        return place.link.ask(
            lambda seq: m.Assign(seq, place.table, 0, place.link.locate(values)),
            payload=lambda: place.following(values),
        )

    # -- updates and reads --------------------------------------------------------------------

    def push(self, grad: torch.Tensor, settings: dict[str, Any] | None) -> list[Work[Any]]:
        """Hand over an update, which counts at once. Results that are replies say how it ended."""
        return self._push(grad, settings, None)

    def push_pull(
        self, grad: torch.Tensor, settings: dict[str, Any] | None, out: torch.Tensor
    ) -> list[Work[Any]]:
        """Hand over an update; the answers come with values, when the rule allows."""
        if not self.spec.rule.takes_turns:
            return self._push(grad, settings, out)
        works = self.push(grad, settings)
        for work in works:
            work.wait()
        return [*works, *self.pull(out)]

    def pull(self, out: torch.Tensor) -> list[Work[Any]]:
        """Read when the clocks let this worker. With turns: blocks until they have."""
        works = []
        for place in self._places:
            works.append(
                self._read(place, out, lambda seq, n, into: m.Pull(seq, n, in_turn=True, into=into))
            )
            if self.spec.rule.takes_turns:
                works[-1].wait()
        return works

    def peek(self, out: torch.Tensor) -> list[Work[Any]]:
        """Read now, without a clock."""
        return [self._read(place, out, m.Peek) for place in self._places]

    def _push(
        self, grad: torch.Tensor, settings: dict[str, Any] | None, out: torch.Tensor | None
    ) -> list[Work[Any]]:
        self.clock += 1
        told = None if settings is None else (settings,)
        works: list[Work[Any]] = []
        for place in self._places:
            works += self._hand_over(place, place.of(grad))
            if out is None:
                commit = self._commit(told, reads=False)
                works.append(place.link.ask(lambda seq, n=place.table, c=commit: c(seq, n, ())))  # type: ignore[misc]
            else:
                works.append(self._read(place, out, self._commit(told, reads=True)))
        return works

    def _commit(
        self, told: tuple[dict[str, Any], ...] | None, *, reads: bool
    ) -> Callable[[int, int, tuple[m.Where, ...]], m.Commit]:
        clock = self.clock
        return lambda seq, table, into: m.Commit(seq, table, clock, told, reads, into)

    def _hand_over(self, place: _Place, grad: torch.Tensor) -> Sequence[Work[Any]]:
        clock = self.clock

        def make(seq: int) -> m.Push:
            where = place.link.hand_over(grad)
            return m.Push(seq, place.table, 0, clock, where, self.spec.dtype)

        def payload() -> Sequence[torch.Tensor]:
            return place.following(grad)

        if not self.spec.rule.aggregate:
            return place.link.tell(make, payload)
        average = place.link.ask(make, payload)  # nobody wants it, but a refusal is told with it

        def finish() -> None:
            average.wait()

        return (Work(average.handle, finish, average),)

    def _read(
        self,
        place: _Place,
        out: torch.Tensor,
        make: Callable[[int, int, tuple[m.Where, ...]], m.AnyRequest],
    ) -> Work[m.Reply]:
        target = place.of(out)
        return place.link.ask(
            lambda seq: make(seq, place.table, place.locate(out)), into=lambda _: (target,)
        )

    # -- versions -----------------------------------------------------------------------------

    def versions(self) -> list[int]:
        """Return the version of every part. Blocks until all have values."""
        works = self.follow(-1)
        return [work.wait().version for work in works]

    def follow(self, after: int, follower: int = 0) -> list[Work[m.Reply]]:
        """Wait until every part has a version above `after`."""
        return [
            place.link.ask(lambda seq, n=place.table: m.Follow(seq, n, after, follower))  # type: ignore[misc]
            for place in self._places
        ]

    def unfollow(self, follower: int) -> None:
        """End what that follower waits for. Blocks until the servers know."""
        for place in self._places:
            place.link.ask(lambda seq, n=place.table: m.Unfollow(seq, n, follower)).wait()  # type: ignore[misc]


def known_keys(connection: Connection) -> list[str]:
    """Name all arrays on all servers. Blocks."""
    works = [link.ask(m.Keys) for link in connection.links]
    return sorted({key for work in works for key in work.wait().keys})


def find(connection: Connection, name: str) -> RemoteArray:
    """Return an array that another worker has made; UnknownKey if none has. Blocks."""
    home = connection.links[home_of(name, len(connection.links))]
    try:
        reply = home.ask(lambda seq: m.Find(seq, name)).wait()
    except UnknownKey:
        reply = m.Reply(0)
    if reply.spec is None or reply.spec.shape is None:
        raise unknown(connection, name)
    _wait_for_values(home, reply.table)
    there = reply.spec
    spec = ArraySpec(
        name, reply.spec.shape, there.shards[0].dtype, there.workers, there.optimizer, there.rule
    )
    array = RemoteArray(connection, spec)
    array.find()
    return array


def unknown(connection: Connection, name: str) -> UsageError:
    """Return the error about a key that nobody has made."""
    keys = known_keys(connection)
    shown = ", ".join(map(repr, keys[:_SHOWN])) + (", ..." if len(keys) > _SHOWN else "")
    return UnknownKey(
        f"rank {connection.rank}: no server has a key {name!r}; known keys: {shown or 'none'}."
        " init() makes one; whoever only reads a key waits until its workers have called it"
    )


def _wait_for_values(link: ServerLink, table: int) -> None:
    link.ask(lambda seq: m.Follow(seq, table, -1)).wait()
