"""Members that have left a job of fixed size, and join it again (`pl.shutdown(); pl.init()`).

A rank may call init() again while others have not called shutdown() yet. It waits; when all members
have left, the job begins again with a first generation.

Threads: everything runs in the coordinator's loop.
"""

from __future__ import annotations

from paceline.control import messages as m
from paceline.control.coordinator.member_connections import MemberConnection
from paceline.control.member import Member, Membership
from paceline.control.wait_notice import next_warn_s, warn_s
from paceline.errors import RendezvousError

Waiting = tuple[MemberConnection, m.Join]


class RejoiningMembers:
    """The members that wait for the others to leave."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}  # by rank
        self._first_s, self._warn_after_s = 0.0, 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, connection: MemberConnection, request: m.Join, now_s: float) -> None:
        """Note that a member waits."""
        if not self._waiting:
            self._first_s, self._warn_after_s = now_s, warn_s()
        self._waiting[request.member.rank] = (connection, request)

    def discard(self, connection: MemberConnection) -> None:
        """Forget a connection that has ended."""
        held = self._waiting.get(connection.caller.rank)
        if held is not None and held[0] is connection:
            del self._waiting[connection.caller.rank]

    def take(self) -> list[Waiting]:
        """Return those that wait; they wait no longer."""
        waiting, self._waiting = list(self._waiting.values()), {}
        return waiting

    def refuse(self, why: str) -> None:
        """Answer all of them that the job does not begin again."""
        for connection, request in self.take():
            connection.answer(request.id, RendezvousError(why))

    def notify(self, missing: tuple[int, ...], now_s: float) -> None:
        """Tell one of them, after a while, which members have not left."""
        waited_s = now_s - self._first_s
        if not self._waiting or waited_s < self._warn_after_s:
            return
        self._warn_after_s = next_warn_s(self._warn_after_s)
        first = self._waiting[min(self._waiting)][0]
        first.send(m.Missing(missing, waited_s))


def is_rejoin(member: Member, membership: Membership | None) -> bool:
    """Return whether a process that joins has been a member before."""
    if membership is None or member.rank not in membership.ranks:
        return False
    before = membership.member(member.rank)
    return (before.pid, before.host_id, before.role) == (member.pid, member.host_id, member.role)
