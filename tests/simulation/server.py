"""A simulated server: the production replication core around a table that counts.

One line between two servers carries what the copies of all their partitions say to each other, and
the pieces of snapshots in between. Lines of workers belong to a partition and a post (who answers,
and since when); a worker may know of a post before this server does, and is kept waiting then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.control.member import Membership
from paceline.ps.client.failover import Primary, primary_of
from paceline.ps.replication.chain import LogEntry, Message
from simulation.member import RETRY_S, SimMember
from simulation.network import End
from simulation.table import PARTS, Table

if TYPE_CHECKING:
    from simulation.job import SimJob


class Copy:
    """One server's copy of a partition: the `Owner` of a Replica."""

    def __init__(self, server: SimServer, partition: int) -> None:
        self.server, self.partition = server, partition
        self.table = Table(server.job.mode)
        self.replica = server.job.cores.replica(server.rank, self)
        self.lines: dict[int, End] = {}  # by the worker's rank
        self.waiting: list[tuple[int, int, Any]] = []  # requests for when it is open
        self.reviewed = 0  # the generation whose workers the table knows
        self._fill = 0  # how many copies were filled from this one

    # -- what the replica asks for ------------------------------------------------------------

    def send(self, peer: int, message: Message) -> None:
        self.server.send_to(peer, (self.partition, message))

    def apply(self, entry: LogEntry) -> None:
        if entry.again:
            self.server.oracle.counted["answers repeated"] += 1
            remembered = self.replica.applied.answer(entry.rank, entry.seq)
            self.table.again(entry.rank, entry.seq, remembered, self.answer)
        else:
            self.table.apply(entry.rank, entry.seq, entry.op, self.answer)
            if entry.op[0] == "gone":
                self.replica.applied.forget(entry.rank)

    def deliver(self, rank: int, seq: int, answer: Any, extra: Any) -> None:
        generation = self.replica.generation
        self.server.oracle.acknowledged(self.server.rank, self.partition, generation)
        if rank in self.lines:
            self.lines[rank].send((seq, answer, extra))

    def fill(self, peer: int) -> None:
        self._fill += 1
        self.replica.send_part(peer, self.table.skeleton())
        self.server.after(self._pause_s(), self._fill_on, peer, self._fill, 0)

    def _pause_s(self) -> float:
        return self.server.dice.uniform(0.0, 0.4)

    def _fill_on(self, peer: int, fill: int, number: int) -> None:
        """Send the next part, unless another copy is filled by now, or this one anew."""
        if fill != self._fill:
            return
        if number == PARTS:
            self.replica.filled(peer)
            self.server.settle(self)
        elif self.replica.send_part(peer, self.table.part(number)):
            self.server.after(self._pause_s(), self._fill_on, peer, fill, number + 1)

    def restore(self, content: Any) -> None:
        if isinstance(content, Table):
            self.table = content
        else:
            self.table.take_part(*content)

    def in_sync(self, generation: int) -> None:
        self.server.world.say(self.server.name, "has all of partition {}", self.partition)
        self.server.oracle.require(
            not self.table.absent,
            "{} is in sync with partition {}, but lacks {}",
            self.server.name,
            self.partition,
            self.table.absent,
        )
        self.server.oracle.counted["copies filled"] += 1
        self.server.claims.add((self.partition, generation))
        self.server.tell("in_sync", self.partition, generation)

    # -- requests -----------------------------------------------------------------------------

    def take_requests(self) -> None:
        """Take what has come, if this copy answers now."""
        while self.waiting and self.replica.is_open:
            rank, seq, op = self.waiting.pop(0)
            if rank in self.lines:
                self.take(rank, seq, op)

    def take(self, rank: int, seq: int, op: Any) -> None:
        """Apply a new request if this copy is alone, else submit it; as ps/server/server.py
        does."""
        applied, cores = self.replica.applied, self.server.job.cores
        client = applied.clients.get(rank)
        is_new = client is not None and (seq > client.last or cores.applies_again_alone)
        if not self.replica.is_alone or client is None or not is_new:
            self.replica.submit(rank, seq, op)
            return
        client.last = seq
        applied.index += 1
        self.server.oracle.counted["requests taken alone"] += 1
        self.table.apply(rank, seq, op, self.answer)

    def answer(self, rank: int, seq: int, answer: Any, extra: Any = None) -> None:
        """Answer a request, at once if this copy is alone."""
        if self.replica.is_alone:
            self.replica.applied.keep(rank, seq, answer)
            self.deliver(rank, seq, answer, extra)
        else:
            self.replica.answer(rank, seq, answer, extra)

    def forget_lines(self) -> None:
        """End the lines of an older post."""
        for end in self.lines.values():
            end.close()
        self.lines.clear()
        self.waiting.clear()


class SimServer(SimMember):
    """A server with copies of some partitions."""

    def __init__(self, job: SimJob, *args: Any, **kwargs: Any) -> None:
        super().__init__(job, *args, **kwargs)
        self.copies: dict[int, Copy] = {}
        self.claims: set[tuple[int, int]] = set()  # said to be in sync, and not listed yet
        self._peers: dict[int, End] = {}  # lines to other servers, by rank
        self._calling: set[int] = set()
        self._posts: dict[int, Primary | None] = {}  # of each partition, as adopted
        self._early: dict[End, list[Any]] = {}  # lines of those who know more, and what they say

    # -- membership ---------------------------------------------------------------------------

    def on_membership(self, membership: Membership) -> None:
        for partition, holders in enumerate(membership.partitions):
            if self.rank in holders:
                self.claims = {claim for claim in self.claims if claim[0] != partition}
            copy = self._copy(partition)
            copy.replica.adopt(membership.generation, holders, membership.filling[partition])
            self._change_post(copy, primary_of(membership, partition))
            for rank in [rank for rank in copy.lines if rank not in membership.ranks]:
                copy.lines.pop(rank).close()
        for copy in self.copies.values():
            self.settle(copy)
        self._call_neighbours()
        early, self._early = self._early, {}
        for end, messages in early.items():
            self.on_line(end)
            for message in messages:
                self.on_line_message(end, message)

    def _copy(self, partition: int) -> Copy:
        """Return the copy of a partition, which may be none: who is told too early remembers."""
        if partition not in self.copies:
            self.copies[partition] = Copy(self, partition)
            for peer in self._peers:
                self.copies[partition].replica.connected(peer)
        return self.copies[partition]

    def _change_post(self, copy: Copy, post: Primary | None) -> None:
        if post != self._posts.get(copy.partition):
            self._posts[copy.partition] = post
            copy.forget_lines()

    def on_attached(self) -> None:
        for claim in sorted(self.claims):
            self.tell("in_sync", *claim)

    def on_unwanted(self) -> None:
        assert self.membership is not None
        if not any(self.rank in r for r in (*self.membership.partitions, *self.membership.filling)):
            self.leave(is_finished=False)

    def settle(self, copy: Copy) -> None:
        """After anything has happened to a copy: who is gone, who waits, what is acknowledged."""
        if copy.replica.is_open and copy.reviewed != self.generation:
            self._review_workers(copy)
        copy.take_requests()
        copy.replica.flush()
        self.oracle.look_at(self, copy)
        if all(one.replica.is_settled for one in self.copies.values()):
            self.adopt()

    def _review_workers(self, copy: Copy) -> None:
        """Let the table know who is gone; only a primary notices."""
        assert self.membership is not None
        copy.reviewed = self.generation
        here = {self.membership.member(rank).number for rank in self.membership.workers}
        joining = {rank: number for rank, (number, _) in copy.table.joining.items()}
        for rank, number in (copy.table.numbers | joining).items():
            if rank not in self.membership.ranks:
                copy.replica.submit(rank, 0, ("gone", number in here))

    # -- lines between servers ----------------------------------------------------------------

    def _call_neighbours(self) -> None:
        """Connect to whoever is next to this server in some chain; of two the lower rank calls."""
        assert self.membership is not None
        for partition, holders in enumerate(self.membership.partitions):
            chain = (*holders, *self.membership.filling[partition][:1])
            if self.rank not in chain:
                continue
            place = chain.index(self.rank)
            for peer in (*chain[max(0, place - 1) : place], *chain[place + 1 : place + 2]):
                if self.rank < peer and peer not in self._peers and peer not in self._calling:
                    self._calling.add(peer)
                    name = self.job.by_rank[peer].name
                    self.network.connect(self, name, f"servers {peer}", pulses=True)

    def send_to(self, peer: int, message: Any) -> None:
        if peer in self._peers:
            self._peers[peer].send(message)

    def is_broken(self, rank: int) -> bool:
        return rank not in self._peers

    def on_line(self, end: End) -> None:
        if end.what.startswith("servers"):
            self._on_peer(end)
            return
        partition, since, rank, generation = map(int, end.what.split()[1:])
        if self.membership is None or self.membership.generation < generation:
            self._early[end] = []
        elif self._posts.get(partition) == Primary(self.rank, since) and (
            rank in self.membership.ranks
        ):
            self.copies[partition].lines[rank] = end
        else:
            end.close()

    def _on_peer(self, end: End) -> None:
        assert end.peer is not None
        peer = end.peer.owner.rank  # type: ignore[attr-defined]
        self._calling.discard(peer)
        old = self._peers.get(peer)
        if old is not None and old is not end:
            old.close()
            self._tell_copies("disconnected", peer)
        self._peers[peer] = end
        self._tell_copies("connected", peer)

    def _tell_copies(self, what: str, peer: int) -> None:
        for copy in self.copies.values():
            getattr(copy.replica, what)(peer)
            if self.membership is not None:
                self.settle(copy)

    def on_line_end(self, end: End, why: str) -> None:
        if not end.what.startswith("servers"):
            for copy in self.copies.values():
                copy.lines = {r: line for r, line in copy.lines.items() if line is not end}
            return
        peer = int(end.what.split()[1])
        if peer == self.rank:  # the other one has called
            peer = end.peer.owner.rank  # type: ignore[union-attr]
        if end.peer is None and peer in self._calling:  # it could not be made
            self._calling.discard(peer)
            self.after(RETRY_S, self._call_neighbours)
        elif self._peers.get(peer) is end:
            del self._peers[peer]
            self._tell_copies("disconnected", peer)
            self.accuse_later(peer, f"the line is broken ({why})")
            if self.job.reconnects:
                self.after(RETRY_S, self._call_neighbours)

    def on_line_message(self, end: End, message: Any) -> None:
        if end in self._early:
            self._early[end].append(message)
        elif end.what.startswith("servers"):
            partition, content = message
            copy = self._copy(partition)
            peer = end.peer.owner.rank  # type: ignore[union-attr]
            copy.replica.receive(peer, content)
            if self.membership is not None:
                self.settle(copy)
        else:
            partition, _, rank, _ = map(int, end.what.split()[1:])
            copy = self.copies[partition]
            if copy.lines.get(rank) is end:
                copy.waiting.append((rank, *message))
                self.settle(copy)
