"""The members' connections: which one counts for a rank, and sending to all of them.

A rank has one connection that counts: of a member, of a joining process, or of an initial member
that waits for the others. If a member connects again, the new connection replaces the old one,
whose end then has no effect.

`PendingMembers`: how long initial members wait for the missing ranks, and what they are sent
meanwhile.

Threads: everything runs in the coordinator's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from paceline.control import messages as m
from paceline.control.coordinator.store import Value
from paceline.control.member import Member
from paceline.control.transport.auth import Hello
from paceline.control.transport.channel import Channel
from paceline.control.wait_notice import next_warn_s, warn_s
from paceline.errors import PacelineError, RendezvousError

log = logging.getLogger("paceline.control")


class MemberConnection:
    """One authenticated connection; `member` is set once it has joined, or asked to."""

    def __init__(self, channel: Channel[m.MemberMessage], caller: Hello) -> None:
        self.channel, self.caller = channel, caller
        self.member: Member | None = None
        self.join: m.Join | m.Ready | None = None  # asked, and not answered yet
        self.farewell: m.Leave | None = None
        self.waits: dict[int, Callable[[], None]] = {}  # request id -> cancel its wait

    def require_rank(self, rank: int) -> None:
        """Raise RendezvousError if the process asks in the name of another rank."""
        if rank != self.caller.rank:
            raise RendezvousError(
                f"a process authenticated as rank {self.caller.rank} asked to join as rank {rank}"
            )

    def answer(self, request_id: int, value: Value | PacelineError) -> None:
        self.waits.pop(request_id, None)
        if isinstance(value, PacelineError):
            self.send(m.Failure(request_id, type(value).__name__, str(value)))
        else:
            self.send(m.Reply(request_id, value))

    def send(self, message: m.CoordinatorMessage) -> None:
        try:
            self.channel.send(message)
        except PacelineError as error:  # it does not read; its own task sees the closed channel
            log.warning("rank %d: %s", self.caller.rank, error)


class MemberConnections:
    """The connections of one job, and the last known state of each rank."""

    def __init__(self) -> None:
        self.all: set[MemberConnection] = set()  # also those that do not count yet
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}  # rank -> why
        self.states: dict[int, str] = {}  # by rank: its last Presence, as text
        self._by_rank: dict[int, MemberConnection] = {}

    def __contains__(self, rank: object) -> bool:
        return rank in self._by_rank

    def __iter__(self) -> Iterator[tuple[int, MemberConnection]]:
        return iter(list(self._by_rank.items()))

    def begin_again(self) -> None:
        """Forget what became of the members: all have left, and join again."""
        self.left.clear()
        self.states.clear()

    def counts(self, connection: MemberConnection) -> bool:
        """Return whether this connection is the one that counts for its rank."""
        return self._by_rank.get(connection.caller.rank) is connection

    def use(self, connection: MemberConnection) -> None:
        """Make this connection the one that counts for its rank."""
        before = self._by_rank.get(connection.caller.rank)
        self._by_rank[connection.caller.rank] = connection
        if before is not None and before is not connection:
            before.channel.close()

    def discard(self, connection: MemberConnection) -> None:
        """Forget a connection that counted and has ended."""
        if self.counts(connection):
            del self._by_rank[connection.caller.rank]

    def announce(self, changed: m.Changed) -> None:
        """Send a membership to all; processes that asked to join it get their answer."""
        membership = changed.membership
        # Rank 0 last: the coordinator may run in its process, which may exit as soon as it knows.
        for rank, connection in sorted(self, key=lambda entry: -entry[0]):
            if connection.join is not None and rank in membership.ranks:
                request, connection.join = connection.join, None
                connection.send(m.Joined(request.id, membership))
            else:
                connection.send(changed)

    def send_presence(self, presence: m.Presence) -> None:
        """Send a member's new state to all; a lost member receives it too, and is disconnected."""
        about = presence.rank
        self.states[about] = f"{presence.state}: {presence.text}"
        if presence.state == "back":
            self.states.pop(about)
        elif presence.state == "left":
            self.left.add(about)
        elif presence.state == "lost":
            self.lost[about] = presence.text
        for rank, connection in self:
            if rank != about:
                connection.send(presence)
        gone = self._by_rank.pop(about, None) if presence.is_gone else None
        if gone is not None:
            gone.send(presence)
            gone.channel.close()

    def end(self, why: str) -> None:
        """Notify all members that the job is over."""
        for _, connection in self:
            if connection.join is not None:
                connection.answer(connection.join.id, RendezvousError(f"the job is over: {why}"))
                connection.join = None
            connection.send(m.Over(why))


class PendingMembers:
    """Initial members that wait for missing ranks. When the first deadline passes, all give up."""

    def __init__(self, world_size: int, join_timeout_s: float) -> None:
        self._world_size, self._join_timeout_s = world_size, join_timeout_s
        self._first_s: float | None = None  # when the first one joined
        self._deadline_s, self._warn_after_s = 0.0, warn_s()
        self._failure: RendezvousError | None = None

    def require_open(self) -> None:
        """Raise the error that earlier members got, if they have given up."""
        if self._failure is not None:
            raise self._failure

    def add(self, request: m.Join, now_s: float, *, is_first: bool) -> None:
        """Note that a member waits from now on."""
        deadline_s = now_s + min(request.timeout_s, self._join_timeout_s)
        if is_first or self._first_s is None:
            self._first_s, self._deadline_s = now_s, deadline_s
            self._warn_after_s = warn_s()
        self._deadline_s = min(self._deadline_s, deadline_s)

    def check(
        self, now_s: float, connections: Collection[MemberConnection], missing: Sequence[int]
    ) -> None:
        """Send the missing ranks to one waiting member; after a deadline, give up for all."""
        waiting = sorted((c for c in connections if c.join), key=lambda c: c.caller.rank)
        if not waiting or self._first_s is None:
            return
        waited_s = now_s - self._first_s
        if now_s >= self._deadline_s:
            self._failure = RendezvousError(
                f"waited {waited_s:.0f} s for ranks {list(missing)} of {self._world_size} to join;"
                " see why they did not start, or raise PACELINE_JOIN_TIMEOUT_S"
            )
            for connection in waiting:
                assert connection.join is not None
                connection.answer(connection.join.id, self._failure)
                connection.join = None
        elif waited_s >= self._warn_after_s:
            self._warn_after_s = next_warn_s(self._warn_after_s)
            if waiting[0].caller.role == "worker":  # one line per job; servers always wait
                waiting[0].send(m.Missing(tuple(missing), waited_s))
