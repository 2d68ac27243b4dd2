"""Members and memberships: plain values.

A membership never changes. A change of the job is another membership with a higher generation, so
a holder can compare it, keep it or pass it on without locks.

A RANK identifies one process for the whole life of the job and is never reused: a late message of a
lost process cannot be mistaken for one of its replacement. A NUMBER counts within a role ("worker
3", "server 0"); a replacement takes the number of the process that it replaces. Workers are ordered
by number, in groups and in sums. In a job without losses the ranks of workers are their numbers.

A PARTITION is a part of the parameter servers' tables that moves and fails over as a whole. The
membership lists the servers that hold it: the first is its primary, which answers; the others are
backups. A backup that is still catching up is FILLING: it is listed apart, and becomes a holder in
the generation after it reported that it has caught up. Holders have everything that was ever
acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Member(msgspec.Struct, frozen=True):
    """One process of the job, and the addresses of its link listener."""

    rank: int
    role: str
    host_id: str
    hostname: str
    pid: int
    local_rank: int
    unix: str  # abstract Unix socket of its link listener, without the leading NUL
    tcp: str  # "host:port" of its link listener, "" if the job is on one host
    number: int = 0  # within its role

    @property
    def where(self) -> str:
        """Host and pid of the process: 'host:pid'."""
        return f"{self.hostname}:{self.pid}"


class Membership(msgspec.Struct, frozen=True):
    """The members of one generation, in order of rank, and which servers hold which partition."""

    generation: int
    members: tuple[Member, ...]
    partitions: tuple[tuple[int, ...], ...] = ()  # ranks of servers; empty: one on each server
    workers_since: int = 1  # the generation in which the workers last changed
    primaries_since: tuple[int, ...] = ()  # by partition, the same of its primary; empty: always
    filling: tuple[tuple[int, ...], ...] = ()  # by partition: servers that are catching up
    vacant: tuple[int, ...] = ()  # lost workers that wait for a replacement

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks of the workers, ordered by number."""
        return self._of_role("worker")

    @property
    def worker_numbers(self) -> tuple[int, ...]:
        """The numbers of the workers, in order."""
        return tuple(sorted(m.number for m in self.members if m.role == "worker"))

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks of the parameter servers, ordered by number."""
        return self._of_role("server")

    @property
    def data_workers(self) -> tuple[int, ...]:
        """The ranks of the data workers, ordered by number."""
        return self._of_role("data")

    def _of_role(self, role: str) -> tuple[int, ...]:
        found = [member for member in self.members if member.role == role]
        return tuple(m.rank for m in sorted(found, key=lambda m: (m.number, m.rank)))

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """By partition: the servers that hold it, its primary first; empty if it is lost."""
        return self.partitions or tuple((server,) for server in self.servers)

    def fills(self, rank: int) -> tuple[int, ...]:
        """Return the partitions with which a server is catching up."""
        return tuple(p for p, ranks in enumerate(self.filling) if rank in ranks)

    def primary_since(self, partition: int) -> int:
        """Return the generation since which a partition has had its primary."""
        return self.primaries_since[partition] if partition < len(self.primaries_since) else 1

    @property
    def world_size(self) -> int:
        return len(self.members)

    def member(self, rank: int) -> Member:
        """Return the member with that rank; KeyError if it is not in this generation."""
        for member in self.members:
            if member.rank == rank:
                return member
        raise KeyError(f"rank {rank} is not in generation {self.generation} {list(self.ranks)}")

    def without(self, ranks: Iterable[int]) -> Membership:
        """Return the next generation, without these ranks."""
        gone = set(ranks)
        stay = tuple(member for member in self.members if member.rank not in gone)
        held, filling = (
            tuple(tuple(r for r in ranks if r not in gone) for ranks in by_partition)
            for by_partition in (self.partitions, self.filling)
        )
        return self.next(stay, held, filling, tuple(r for r in self.vacant if r not in gone))

    def next(
        self,
        members: Iterable[Member],
        partitions: tuple[tuple[int, ...], ...] = (),
        filling: tuple[tuple[int, ...], ...] = (),
        vacant: tuple[int, ...] = (),
    ) -> Membership:
        """Return the next generation, with these members."""
        ordered = tuple(sorted(members, key=lambda member: member.rank))
        following = Membership(
            self.generation + 1,
            ordered,
            partitions,
            self.workers_since,
            filling=filling,
            vacant=vacant,
        )
        since = tuple(
            self.primary_since(number) if now[:1] == before[:1] else following.generation
            for number, (before, now) in enumerate(
                zip(self.holders, following.holders, strict=False)
            )
        )
        following = msgspec.structs.replace(following, primaries_since=since)
        if following.workers == self.workers:
            return following
        return msgspec.structs.replace(following, workers_since=following.generation)
