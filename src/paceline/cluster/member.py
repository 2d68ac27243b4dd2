"""Members and memberships: plain values that say who is in the job.

A membership never changes; a change of the job is another membership with a higher generation.
Whoever holds one can therefore compare, keep or pass it on without locks.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Member(msgspec.Struct, frozen=True):
    """One process of the job and where its links can be reached."""

    rank: int
    role: str
    host_id: str
    hostname: str
    pid: int
    local_rank: int
    unix: str  # abstract Unix socket of its link listener, without the leading NUL
    tcp: str  # "host:port" of its link listener, "" when the job is on one host

    @property
    def where(self) -> str:
        """Name the process for people: 'host:pid'."""
        return f"{self.hostname}:{self.pid}"


class Membership(msgspec.Struct, frozen=True):
    """The members of one generation, in order of rank."""

    generation: int
    members: tuple[Member, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks of those that run the script."""
        return tuple(member.rank for member in self.members if member.role == "worker")

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks of the parameter servers."""
        return tuple(member.rank for member in self.members if member.role == "server")

    @property
    def world_size(self) -> int:
        return len(self.members)

    def member(self, rank: int) -> Member:
        """Return the member with that rank; KeyError when it is not in this generation."""
        for member in self.members:
            if member.rank == rank:
                return member
        raise KeyError(f"rank {rank} is not in generation {self.generation} {list(self.ranks)}")

    def without(self, ranks: Iterable[int]) -> Membership:
        """Return the next generation, in which those ranks are gone; the others keep theirs."""
        gone = set(ranks)
        stay = tuple(member for member in self.members if member.rank not in gone)
        return Membership(self.generation + 1, stay)
