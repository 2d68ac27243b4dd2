"""The gathering of the ranks before the first generation.

`Assembly`, without any I/O: ranks arrive in any order; when the last one is there the membership
exists. A rank that goes away before that makes its place free again; after that the membership
stands, whatever happens to its members. `WaitingRoom`: how long the ranks that are there wait, and
the notices that they get meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.control.coordinator.member_connections import Peer
from paceline.control.member import Member, Membership
from paceline.control.transport import messages as m
from paceline.control.wait_notice import further_s, warn_s
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


class WaitingRoom:
    """Those that have joined and wait. The first one who runs out of time gives up for all."""

    def __init__(self, world_size: int, join_timeout_s: float) -> None:
        self._world_size, self._join_timeout_s = world_size, join_timeout_s
        self._first_s: float | None = None  # when the first one came
        self._deadline_s, self._notice_after_s = 0.0, warn_s()
        self._failure: RendezvousError | None = None

    def require_open(self) -> None:
        """Raise what those before were told, when they have given up."""
        if self._failure is not None:
            raise self._failure

    def enter(self, request: m.Join, now_s: float, *, is_first: bool) -> None:
        """Note that somebody waits from now on."""
        deadline_s = now_s + min(request.timeout_s, self._join_timeout_s)
        if is_first or self._first_s is None:
            self._first_s, self._deadline_s = now_s, deadline_s
            self._notice_after_s = warn_s()
        self._deadline_s = min(self._deadline_s, deadline_s)

    def check(self, now_s: float, peers: Collection[Peer], missing: Sequence[int]) -> None:
        """Say who is missing; give up for all when the first of the waiting runs out of time."""
        waiting = sorted((p for p in peers if p.join), key=lambda p: p.caller.rank)
        if not waiting or self._first_s is None:
            return
        waited_s = now_s - self._first_s
        if now_s >= self._deadline_s:
            self._failure = RendezvousError(
                f"waited {waited_s:.0f} s for ranks {list(missing)} of {self._world_size} to join;"
                " see why they did not start, or raise PACELINE_JOIN_TIMEOUT_S"
            )
            for peer in waiting:
                assert peer.join is not None
                peer.answer(peer.join.id, self._failure)
                peer.join = None
        elif waited_s >= self._notice_after_s:
            self._notice_after_s = further_s(self._notice_after_s)
            if waiting[0].caller.role == "worker":  # one line per job; servers wait by nature
                waiting[0].tell(m.Missing(tuple(missing), waited_s))
