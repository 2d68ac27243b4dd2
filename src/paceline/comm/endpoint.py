"""Endpoint: one process's engine, and its links to the other processes of the job.

Neighbours (same `host_id`) are linked once per process with a Unix socket, over which the engine
passes shared memory and notices a death. Members on other hosts get two TCP connections per group,
one for collectives and one for point-to-point traffic, so that neither can block the other.
The lower rank connects, the higher one waits; a link is authenticated before the engine sees it.

Which processes count as the job is another question: fabric.py answers it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline import _core
from paceline.control.member import Member
from paceline.control.transport.messages import Presence
from paceline.control.transport.peer_connections import LinkListener
from paceline.control.wait_notice import WaitNotice
from paceline.errors import ConnectError, PeerLost, PeerTimeout, RendezvousError

_STEP_S = 0.5
_AT_ONCE_S = 1e-3
_LOOK_S = 0.1  # for what a member should have sent before it left
_CONNECT_STEPS = 10  # a handshake under way must not be given up for the sake of a look around
LANES = ("collective", "point-to-point")  # numbered as in the engine

# Raises when a group of these members will never be formed, because the membership has changed.
StillValid = Callable[[Sequence[Member]], None]


@dataclass
class Endpoint:
    """One process's engine and what it needs to reach the others."""

    rank: int
    engine: _core.Engine
    listener: LinkListener | None  # None in a world of one
    me: Member
    timeout_s: float
    presence: Mapping[int, Presence] = field(default_factory=dict)  # what is known of the others
    _linked: set[int] = field(default_factory=set)  # neighbours
    _link_mus: dict[int, threading.Lock] = field(default_factory=dict)  # by rank

    def link_neighbours(self, members: Sequence[Member]) -> None:
        """Link to every one of these processes on this host. Blocks until all of them answered."""
        missing = [
            member
            for member in members
            if self._is_neighbour(member) and member.rank not in self._linked
        ]
        for rank, fd in self._link(missing, "local", self.timeout_s, _always, local=True):
            self.engine.add_local_peer(rank, fd)
            self._linked.add(rank)
        self.engine.await_local_peers(self.timeout_s)

    def link(self, member: Member, still_valid: StillValid) -> None:
        """Link to a member of this host that came later; without effect if that is done."""
        if not self._is_neighbour(member):
            return
        with self._link_mus.setdefault(member.rank, threading.Lock()):  # threads may meet here
            if member.rank in self._linked:
                return
            ((rank, fd),) = self._link([member], "local", self.timeout_s, still_valid, local=True)
            self.engine.add_local_peer(rank, fd)
            self.engine.await_local_peers(self.timeout_s, [rank])
            self._linked.add(rank)

    def _is_neighbour(self, member: Member) -> bool:
        return member.host_id == self.me.host_id and member.rank != self.rank

    def is_linked(self, rank: int) -> bool:
        """Return whether a process is of this host, and its memory can be seen."""
        return rank in self._linked

    def end(self, rank: int) -> None:
        """End a lost process of this host: one that was only stopped could still write to memory
        that we share."""
        if rank in self._linked:
            self.engine.end_peer(rank)

    def forget(self, rank: int) -> None:
        """Drop what is held of a neighbour that is gone."""
        if rank in self._linked:
            self._linked.discard(rank)
            self.engine.forget_peer(rank)

    def create_group(
        self,
        group_id: int,
        generation: int,
        members: Sequence[Member],
        timeout_s: float,
        still_valid: StillValid,
    ) -> _core.Group:
        """Form the group in the engine and connect its members. Collective among the ranks."""
        for member in members:
            self.link(member, still_valid)
        host_ids = list(dict.fromkeys(member.host_id for member in members))
        hosts = [host_ids.index(member.host_id) for member in members]
        group = self._form(members, group_id, generation, hosts, timeout_s, still_valid)
        ranks = [member.rank for member in members]
        remote = [member for member in members if member.host_id != self.me.host_id]
        for lane, name in enumerate(LANES):
            purpose = f"group {group_id:x} generation {generation} {name}"
            for rank, fd in self._link(remote, purpose, timeout_s, still_valid, local=False):
                group.add_channel(ranks.index(rank), lane, fd)
        return group

    def _form(
        self,
        members: Sequence[Member],
        group_id: int,
        generation: int,
        hosts: list[int],
        timeout_s: float,
        still_valid: StillValid,
    ) -> _core.Group:
        """Form the part of a group that is on this host, in short steps.

        The first of them here makes the memory for it; nobody else is waited for.
        """
        ranks, others = [m.rank for m in members], [m for m in members if m.rank != self.rank]
        deadline_s, step_s = time.monotonic() + timeout_s, _AT_ONCE_S
        notice = WaitNotice(
            f"rank {self.rank} waits for ranks {ranks} to form a group",
            "forming a group",
            [one.rank for one in others],
        )
        maker = next(member for member in members if member.host_id == self.me.host_id)
        while True:
            has_left = self._has_finished(maker)
            try:
                return _core.Group(
                    self.engine, group_id, generation, ranks, hosts, timeout_s, step_s
                )
            except PeerTimeout:
                if has_left:
                    raise self._is_gone(maker.rank) from None
                if time.monotonic() >= deadline_s:
                    raise
            self._require_presence(others)
            still_valid(others)
            notice.check()
            step_s = _STEP_S

    def _link(
        self,
        members: Sequence[Member],
        purpose: str,
        timeout_s: float,
        still_valid: StillValid,
        *,
        local: bool,
    ) -> list[tuple[int, int]]:
        if not members:
            return []
        assert self.listener is not None, "a world of one has no other members"
        listener, fds = self.listener, list[tuple[int, int]]()
        # All connects come first: they need no one's cooperation, so nobody waits in a circle.
        for member in sorted(members, key=lambda member: member.rank < self.rank):

            def link(step_s: float, member: Member = member) -> int:
                if self.rank < member.rank:
                    return listener.connect(member, purpose, local, _CONNECT_STEPS * step_s)
                return listener.accepted(member.rank, purpose, step_s)

            def look_around() -> None:
                self._require_presence(members)
                still_valid(members)

            try:
                fds.append((member.rank, self._patiently(link, member, look_around, timeout_s)))
            except BaseException:
                for _, fd in fds:
                    os.close(fd)
                raise
        return fds

    def _patiently(
        self,
        link: Callable[[float], int],
        member: Member,
        look_around: Callable[[], None],
        timeout_s: float,
    ) -> int:
        """Link in short steps: a member that is gone is noticed, and a long wait is explained."""
        deadline_s = time.monotonic() + timeout_s
        notice = WaitNotice(
            f"rank {self.rank} waits for rank {member.rank} ({member.where}) to form a group",
            "forming a group",
            [member.rank],
        )
        while True:
            has_left = self._has_finished(member)
            look_around()
            try:
                step_s = _LOOK_S if has_left else _STEP_S
                return link(min(step_s, max(deadline_s - time.monotonic(), _LOOK_S)))
            except (ConnectError, RendezvousError):
                if has_left:
                    raise self._is_gone(member.rank) from None
                if time.monotonic() >= deadline_s:
                    raise
            notice.check()

    def _require_presence(self, members: Sequence[Member]) -> None:
        """Raise PeerLost if one of the members was lost, or left before its work was done.

        A member that has finished is no obstacle: it may have done its part before it left.
        """
        known = [self.presence[member.rank] for member in members if member.rank in self.presence]
        gone = [presence for presence in known if presence.is_gone and not presence.has_finished]
        # Those who left because somebody was lost are not the ones to be named.
        for presence in sorted(gone, key=lambda presence: presence.state != "lost"):
            raise self._is_gone(presence.rank)

    def _has_finished(self, member: Member) -> bool:
        """Return whether a member has finished and left. What it sent to this process before it
        left is here by then: if one more look does not find it, it never comes."""
        presence = self.presence.get(member.rank)
        return presence is not None and presence.has_finished

    def _is_gone(self, rank: int) -> PeerLost:
        words = self.presence[rank].words
        return PeerLost(
            f"rank {self.rank}: rank {rank} is gone: {words}; a group with it cannot be formed",
            rank=rank,
        )


def _always(_: Sequence[Member]) -> None:
    """The first members of a job do not change while they are linked."""
