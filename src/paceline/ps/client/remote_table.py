"""A worker's view of a table that is spread over the servers.

The table's flat tensors (ITEMS: the buckets of a model, or the array of a key) are cut into shards
by placement.py; here a call about an item becomes requests about its shards. Tensors of an item lie
in engine memory: servers of this host read and write them. remote_array.py has a key's table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch

from paceline.ps import messages as m
from paceline.ps.client.items import (
    Item,
    RemoteShard,
    buffer_of,
    dtype_name,
    shared_memory_of,
    spec_of,
)
from paceline.ps.client.link import See, ServerLink, no_tensors, nothing
from paceline.ps.client.mapping import MappedTable, can_map
from paceline.ps.client.transfer import (
    IncomingTensors,
    LandedWork,
    OutgoingTensor,
    Packets,
    Staging,
)
from paceline.ps.connection import Into
from paceline.ps.packing import Packing
from paceline.ps.placement import Placement, balance, place
from paceline.ps.server.non_finite import is_finite
from paceline.ps.spec import OptimizerSpec, Rule, ShardSpec, TableSpec
from paceline.runtime.work import Together, Work

MakeAbout = Callable[[int, int, m.Where | None], m.AnyRequest]  # number, table, where


class RemoteTable:
    """Pushes to and reads from one table. Not thread-safe."""

    def __init__(
        self,
        links: Sequence[ServerLink],
        workers: Sequence[int],  # their numbers
        name: str,
        items: Sequence[Item],
        optimizer: OptimizerSpec,
        rule: Rule,
        *,
        cut_anywhere: bool = True,
        first_server: int = 0,
        shape: tuple[int, ...] | None = None,
        wire: str = "fp32",
        packing: Packing | None = None,
    ) -> None:
        self.name, self.items, self.rule = name, items, rule
        self.clock = 0  # steps that this worker has committed
        self._staging = Staging(wire)
        self._numbers: dict[int, int] = {}  # the table's number on each server
        self._stands_aside = False
        sizes = [item.params.numel() for item in items]
        self._itemsizes = [item.params.element_size() for item in items]
        cuts = None if cut_anywhere else [[h.start for h in item.held if h.start] for item in items]
        placed = place(sizes, len(links), itemsizes=self._itemsizes, cuts=cuts)
        self._parts = [
            replace(part, server=(part.server + first_server) % len(links)) for part in placed
        ]
        self._links = links
        self._shards: list[list[RemoteShard]] = [[] for _ in items]  # by item
        self._on: dict[int, list[RemoteShard]] = {link.index: [] for link in links}
        for part in self._parts:
            on = self._on[part.server]
            on.append(RemoteShard(links[part.server], len(on), part))
            self._shards[part.item].append(on[-1])
        self.specs = {
            link.index: TableSpec(
                name,
                tuple(workers),
                tuple(spec_of(items[x.part.item], x.part) for x in self._on[link.index]),
                optimizer,
                rule,
                shape,
            )
            for link in links
            if self._on[link.index]
        }
        self.packets = Packets(self._staging, packing, rule.mean_codec)
        self._is_plain = packing is None and not rule.mean_codec and not self._staging.dtype
        maps = can_map(items, list(itertools.chain(*self._shards)))
        self.mapped = MappedTable(items) if maps else None  # the same on all workers
        self._dtypes = {item.grads.dtype: dtype_name(item.grads.dtype) for item in items}
        for shard in itertools.chain(*self._shards):
            first = sum(sizes[: shard.part.item]) + shard.part.start
            self.packets.add(shard, self._spec_of(shard), first)

    @property
    def balance(self) -> str:
        """How much each server holds, for people."""
        owners = [link.server.number for link in self._links]
        parts = [replace(part, server=owners[part.server]) for part in self._parts]
        return balance(parts, self._itemsizes, max(owners) + 1)

    def shards(self) -> Iterator[tuple[ServerLink, int, ShardSpec, Placement]]:
        """Yield all shards: the link to its server, its number there, its spec and its part."""
        for index, spec in self.specs.items():
            for shard in self._on[index]:
                yield shard.link, shard.number, spec.shards[shard.number], shard.part

    # -- making -------------------------------------------------------------------------------

    def open(self, workers: Sequence[int] | None = None) -> None:
        """Create the table on all servers, or join it there. Blocks.

        `workers`: their present numbers, if they have changed since this object was made. A worker
        that replaces another one continues at its clock; the parts of a table may differ by one
        step, which those that have it already only answer.
        """
        clocks = [self._open_on(index, workers).clock for index in self.specs]
        self.clock = min(clocks, default=0)

    def _open_on(self, index: int, workers: Sequence[int] | None = None) -> m.Reply:
        """Create or join one server's part of the table. Blocks."""
        spec, shards, link = self.specs[index], self._on[index], self._links[index]
        if workers is not None:
            spec = msgspec.structs.replace(spec, workers=tuple(workers))

        def make(seq: int) -> m.Open:
            buffers = tuple(buffer_of(self.items[shard.part.item], shard) for shard in shards)
            wants_average, wire = self.items[0].average is not None, self._staging.dtype
            shared = tuple(shared_memory_of(self.items, shards))
            maps = self.mapped is not None
            return m.Open(seq, spec, buffers, shared, wants_average, wire, maps)

        reply = link.ask(make).wait()
        self._numbers[index] = reply.table
        link.holds += [f"{spec.name} {shard.label}" for shard in spec.shards]
        return reply

    def assign(self, number: int, held: Sequence[int] = ()) -> None:
        """Set an item's values on the servers to this worker's; `held`: only of these. Blocks."""
        item = self.items[number]
        if item.is_shared and item.shared_memory is None:
            return  # it is another worker's memory, and the servers' own: they have the values
        works = [
            self._assign(shard, item.params, tuple(held))
            for shard in self._shards[number]
            if not held or any(p.param in held for p in self._spec_of(shard).pieces)
        ]
        Together(works).wait()

    def _assign(
        self, shard: RemoteShard, flat: torch.Tensor, held: tuple[int, ...] = ()
    ) -> Work[m.Reply]:
        def make(seq: int, table: int, where: m.Where | None) -> m.Assign:
            return m.Assign(seq, table, shard.number, where, held)

        return self._ask(OutgoingTensor(shard, flat), make)

    # -- a step -------------------------------------------------------------------------------

    def push(self, number: int, absent: Sequence[int] = (), key: int | None = None) -> Work[Any]:
        """Hand over an item's gradients, packed if there are packets for them.

        Done when the average is there, or, if the table averages nothing, when the gradients may be
        changed again; on one host, where they are read in place, they may be changed until the
        commit. What is pushed again under the same `key` is packed once; None: it is not packed,
        where workers average.
        """
        item, works, clock = self.items[number], list[Any](), self.clock + 1
        if self._is_plain:
            for shard in self._shards[number]:
                works += self._push_plain(shard, item.grads, item.average, tuple(absent))
            return Together(works).work()
        if not self.rule.aggregate:
            key = clock  # a step is packed once, when it ends
        for shard in self._shards[number]:
            grad = self.packets.outgoing(shard, item.grads, absent, key)

            def make(
                seq: int,
                table: int,
                where: m.Where | None,
                shard: RemoteShard = shard,
                grad: OutgoingTensor = grad,
            ) -> m.Push:
                return m.Push(
                    seq,
                    table,
                    shard.number,
                    clock,
                    where,
                    dtype_name(grad.tensor.dtype),
                    tuple(absent),
                    grad.codec,
                    grad.tensor.nbytes if grad.codec else 0,
                )

            if not self.rule.aggregate:
                works += self._tell(grad, make)
                continue
            incoming = self.packets.incoming_mean(shard, item.average)
            asked = self._ask(grad, make, incoming, self._sees_average(shard))
            works.append(LandedWork(asked, incoming))
        return Together(works).work()

    def _push_plain(
        self,
        shard: RemoteShard,
        grads: torch.Tensor,
        average: torch.Tensor | None,
        absent: tuple[int, ...] = (),
    ) -> list[Work[Any]]:
        """Push a shard unchanged: it is neither packed nor converted."""
        link, part, clock = shard.link, shard.part, self.clock + 1
        grad, table = grads[part.start : part.stop], self._numbers[shard.link.index]

        def make(seq: int) -> m.Push:
            where = link.hand_over(grad)
            return m.Push(seq, table, shard.number, clock, where, self._dtypes[grad.dtype], absent)

        def payload() -> Sequence[torch.Tensor]:
            return () if link.is_local else (grad,)

        def into(_: m.Reply) -> Sequence[torch.Tensor]:
            return () if average is None else (average[part.start : part.stop],)

        if self.rule.aggregate:
            return [link.ask(make, payload, into, self._sees_average(shard))]
        return list(link.tell(make, payload))

    def left_out(self, number: int) -> torch.Tensor | None:
        """Return what of an item's gradients has not been sent yet; None: nothing."""
        found = None
        for shard in self._shards[number]:
            packet = self.packets.of(shard)
            if packet is not None and packet.residual is not None:
                found = torch.zeros_like(self.items[number].grads) if found is None else found
                shard.of(found).copy_(packet.residual)
        return found

    def replace(self, number: int, absent: Sequence[int]) -> None:
        """Let what is in an item's `grads` now take the place of the average. Blocks."""
        works = [
            self._ask(
                OutgoingTensor(shard, self.items[number].grads),
                lambda seq, table, where, n=shard.number: m.Replace(  # type: ignore[misc]
                    seq, table, n, where, tuple(absent)
                ),
            )
            for shard in self._shards[number]
        ]
        Together(works).wait()

    def commit(
        self, settings: Sequence[dict[str, Any]] | None, *, stops: bool = False
    ) -> Work[list[m.Reply]]:
        """End the step; done when fresh values are in every item's `params`. `stops`: this worker
        was asked to stop, which in lockstep all hear with their replies.

        With a bound in versions this worker does not have its next turn yet: `pull(in_turn=True)`
        when it is about to compute. A worker that has its turn and does not compute delays all
        other workers.
        """
        self.clock += 1
        changed, bad = None if settings is None else tuple(settings), self._bad_servers()
        reads, clock = not self.rule.takes_turns and not self.rule.votes, self.clock

        def make(seq: int, table: int, index: int) -> m.Commit:
            counts = not bad or index in bad
            return m.Commit(seq, table, clock, changed, reads, counts=counts, stops=stops)

        if reads:
            return self._read(make)
        commits = [
            self._links[index].ask(lambda seq, i=index, n=number: make(seq, n, i))  # type: ignore[misc]
            for index, number in self._numbers.items()
        ]
        ended = Together(commits)
        if self.rule.votes:
            return ended.work()  # there is nothing to read
        ended.wait()
        self._look().wait()
        return ended.work()

    def pull(self, *, in_turn: bool = False) -> Work[list[m.Reply]]:
        """Read the newest values into every item's `params`, at once or when the rule allows it."""
        if self._stands_aside or (self.rule.takes_turns and not in_turn):
            return self._look()
        return self._read(lambda seq, table, _: m.Pull(seq, table, in_turn))

    # -- watching -----------------------------------------------------------------------------
    is_over = False  # an array's is when its client's job is

    def stand_aside(self) -> None:
        """Leave the table: no worker waits for this one, which may still `pull`. Blocks."""
        self._stands_aside = True
        Together(self._ask_all(lambda seq, table: m.StandAside(seq, table))).wait()

    def follow(self, after: int, follower: int = 0) -> list[Work[m.Reply]]:
        """Wait until every part has a version above `after`."""
        return self._ask_all(lambda seq, table: m.Follow(seq, table, after, follower))

    def unfollow(self, follower: int) -> None:
        """End what that follower waits for. Blocks until the servers know."""
        Together(self._ask_all(lambda seq, table: m.Unfollow(seq, table, follower))).wait()

    def _ask_all(self, make: Callable[[int, int], m.AnyRequest]) -> list[Work[m.Reply]]:
        return [
            self._links[index].ask(lambda seq, n=number: make(seq, n))  # type: ignore[misc]
            for index, number in self._numbers.items()
        ]

    def table_on(self, link: ServerLink) -> int:
        """Return the table's number on that server."""
        return self._numbers[link.index]

    # -- plumbing -----------------------------------------------------------------------------

    def _look(self) -> Work[list[m.Reply]]:
        """Read the newest values without taking a turn."""
        works = []
        for index, number in self._numbers.items():
            link, shards = self._links[index], self._on[index]
            values = [shard.of(self.items[shard.part.item].params) for shard in shards]

            def make(
                seq: int,
                number: int = number,
                link: ServerLink = link,
                values: Sequence[torch.Tensor] = values,
            ) -> m.Peek:
                places = tuple(where for where in map(link.locate, values) if where is not None)
                return m.Peek(seq, number, places)

            works.append(
                link.ask(make, into=lambda _, values=values: values[::-1])  # type: ignore[misc]
            )
        return Together(works).work()

    def _bad_servers(self) -> set[int]:
        """Return the servers that refuse this worker's update, because it is not finite there.

        Each server checks its own part only; the other servers must skip theirs too. In lockstep
        the replies to pushes say so before any worker commits.
        """
        rule = self.rule
        if rule.nonfinite == "ignore" or rule.aggregate or len(self._numbers) == 1:
            return set()
        return {
            shard.link.index
            for shard in itertools.chain(*self._shards)
            if not is_finite(
                self.packets.pushed(shard, self.items[shard.part.item].grads, self.clock)
            )
        }

    def _read(self, make: Callable[[int, int, int], m.AnyRequest]) -> Work[list[m.Reply]]:
        works: list[Any] = []
        for index, number in self._numbers.items():
            # In the order in which the server sends them: the first layers' first.
            shards = self._on[index][::-1]
            targets = [(s, s.of(self.items[s.part.item].params)) for s in shards]
            incoming = IncomingTensors(self._staging, "params", targets)
            work = self._links[index].ask(
                lambda seq, number=number, index=index: make(seq, number, index),  # type: ignore[misc]
                into=incoming,
                see=self._sees_params(shards),
            )
            works.append(LandedWork(work, incoming))
            if self.rule.takes_turns:
                works[-1].wait()
        return Together(works).work()

    def _sees_average(self, shard: RemoteShard) -> See:
        return partial(self.mapped.show_average, shard) if self.mapped is not None else nothing

    def _sees_params(self, shards: Sequence[RemoteShard]) -> See:
        return partial(self.mapped.show_params, shards) if self.mapped is not None else nothing

    def _ask(
        self, sent: OutgoingTensor, make: MakeAbout, into: Into = no_tensors, see: See = nothing
    ) -> Work[m.Reply]:
        link, table = sent.shard.link, self._numbers[sent.shard.link.index]
        return link.ask(lambda seq: make(seq, table, sent.locate()), sent.payload, into, see)

    def _tell(self, outgoing: OutgoingTensor, make: MakeAbout) -> list[Work[None]]:
        link, table = outgoing.shard.link, self._numbers[outgoing.shard.link.index]
        return link.tell(lambda seq: make(seq, table, outgoing.locate()), payload=outgoing.payload)

    def _spec_of(self, shard: RemoteShard) -> ShardSpec:
        return self.specs[shard.link.index].shards[shard.number]
