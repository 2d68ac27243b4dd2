"""The audience: the members' connections, and telling all of them what is new.

A rank has one connection that counts: of a member, of somebody on the way in, or of one of the
first crowd. When a member connects again, the new connection takes the place of the old one, whose
end then means nothing.

Threads: everything runs in the coordinator's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from paceline.control.coordinator.store import Value
from paceline.control.member import Member
from paceline.control.transport import messages as m
from paceline.control.transport.auth import Hello
from paceline.control.transport.channel import Channel
from paceline.errors import PacelineError, RendezvousError

log = logging.getLogger("paceline.control")


class Peer:
    """One authenticated connection; `member` is set once it has joined, or asked to."""

    def __init__(self, channel: Channel[m.MemberMessage], caller: Hello) -> None:
        self.channel, self.caller = channel, caller
        self.member: Member | None = None
        self.join: m.Join | m.Ready | None = None  # asked, and not answered yet
        self.farewell: m.Leave | None = None
        self.waits: dict[int, Callable[[], None]] = {}  # request id -> forget it

    def answer(self, request_id: int, value: Value | PacelineError) -> None:
        self.waits.pop(request_id, None)
        if isinstance(value, PacelineError):
            self.tell(m.Failure(request_id, type(value).__name__, str(value)))
        else:
            self.tell(m.Reply(request_id, value))

    def tell(self, message: m.CoordinatorMessage) -> None:
        try:
            self.channel.send(message)
        except PacelineError as error:  # it does not read; its own task will see the closed channel
            log.warning("rank %d: %s", self.caller.rank, error)


class Audience:
    """The connections of one job, and what was last told about each rank."""

    def __init__(self) -> None:
        self.peers: set[Peer] = set()  # all connections, also those that do not count yet
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}  # rank -> what is known about it
        self.states: dict[int, str] = {}  # by rank: what was last told about it
        self._of_rank: dict[int, Peer] = {}

    def __contains__(self, rank: object) -> bool:
        return rank in self._of_rank

    def __iter__(self) -> Iterator[tuple[int, Peer]]:
        return iter(list(self._of_rank.items()))

    def counts(self, peer: Peer) -> bool:
        """Say whether this connection is the one that counts for its rank."""
        return self._of_rank.get(peer.caller.rank) is peer

    def seat(self, peer: Peer) -> None:
        """Let this connection be the one that counts for its rank."""
        before = self._of_rank.get(peer.caller.rank)
        self._of_rank[peer.caller.rank] = peer
        if before is not None and before is not peer:
            before.channel.close()

    def unseat(self, peer: Peer) -> None:
        """Forget a connection that counted and has ended."""
        if self.counts(peer):
            del self._of_rank[peer.caller.rank]

    def announce(self, changed: m.Changed) -> None:
        """Tell everybody of a membership; those who asked to be in it get their answer."""
        membership = changed.membership
        # Rank 0 last: the coordinator may live in its process, which may end as soon as it knows.
        for rank, peer in sorted(self, key=lambda entry: -entry[0]):
            if peer.join is not None and rank in membership.ranks:
                request, peer.join = peer.join, None
                peer.tell(m.Joined(request.id, membership))
            else:
                peer.tell(changed)

    def tell(self, presence: m.Presence) -> None:
        """Tell everybody how a member is; one that is lost hears it too, and is cut off."""
        about = presence.rank
        self.states[about] = f"{presence.state}: {presence.words}"
        if presence.state == "back":
            self.states.pop(about)
        elif presence.state == "left":
            self.left.add(about)
        elif presence.state == "lost":
            self.lost[about] = presence.words
        for rank, peer in self:
            if rank != about:
                peer.tell(presence)
        gone = self._of_rank.pop(about, None) if presence.state in ("lost", "left") else None
        if gone is not None:
            gone.tell(presence)
            gone.channel.close()

    def end(self, why: str) -> None:
        """Tell everybody that the job is over."""
        for _, peer in self:
            if peer.join is not None:
                peer.answer(peer.join.id, RendezvousError(f"the job is over: {why}"))
                peer.join = None
            peer.tell(m.Over(why))
