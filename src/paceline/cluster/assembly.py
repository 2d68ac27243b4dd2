"""The gathering of the ranks before the first generation, without any I/O.

Ranks arrive in any order; when the last one is there the membership exists. A rank that goes away
before that makes its place free again; after that the membership stands, whatever happens to its
members.
"""

from __future__ import annotations

from paceline.cluster.member import Member, Membership
from paceline.errors import RendezvousError


class Assembly:
    """Collects one member per rank 0..world_size-1."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise RendezvousError(f"world size {world_size}: a job has at least 1 rank")
        self.world_size = world_size
        self.membership: Membership | None = None
        self._members: dict[int, Member] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank not in self._members)

    def add(self, member: Member) -> Membership | None:
        """Seat a member; return the membership when it was the last one."""
        rank = member.rank
        if not 0 <= rank < self.world_size:
            raise RendezvousError(
                f"rank {rank} ({member.where}) is not in 0..{self.world_size - 1}:"
                f" this job has {self.world_size} ranks; check that all use the same world size"
            )
        if rank in self._members:
            raise RendezvousError(
                f"rank {rank} claimed twice ({self._members[rank].where}, {member.where});"
                " give every process its own rank, and every job its own job id"
            )
        self._members[rank] = member
        if not self.missing:
            seats = tuple(self._members[rank] for rank in range(self.world_size))
            self.membership = Membership(generation=1, members=seats)
        return self.membership

    def remove(self, rank: int) -> None:
        """Free the place of a rank that went away; without effect once the membership exists."""
        if self.membership is None:
            self._members.pop(rank, None)
