"""Which members share a host, and the links between all of them.

Neighbours (same `host_id`) are linked once per process with a Unix socket, over which the engine
passes shared memory and notices a death. Members on other hosts get two TCP connections per group,
one for collectives and one for point-to-point traffic, so that neither can block the other.
The lower rank connects, the higher one waits; a link is authenticated before the engine sees it.

In an elastic job members come and go. `adopt()` takes over another membership: whoever is gone is
ended if it is of this host (its memory is ours too), newcomers are linked, and the groups of all
workers follow. `interrupt()` comes from the control thread: operations that wait for somebody who
is lost end at once.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline import _core
from paceline.cluster.links import LinkListener
from paceline.cluster.member import Member, Membership
from paceline.cluster.messages import Presence
from paceline.cluster.notice import WaitNotice
from paceline.errors import (
    ConnectError,
    GenerationChanged,
    PeerLost,
    PeerTimeout,
    RendezvousError,
)

if TYPE_CHECKING:
    from paceline.collectives.group import Group

_STEP_S = 0.5
_AT_ONCE_S = 1e-3
_CONNECT_STEPS = 10  # a handshake under way must not be given up for the sake of a look around
LANES = ("collective", "point-to-point")  # numbered as in the engine


class Follower(Protocol):
    """A group that goes along with changes of the membership."""

    def follow(self, membership: Membership) -> None:
        """Be formed anew from these members, when next used."""

    def interrupt(self, rank: int, text: str) -> None:
        """End what is in flight if that rank is a member."""


@dataclass
class Fabric:
    """One process's engine and what it needs to reach the others."""

    rank: int
    engine: _core.Engine
    listener: LinkListener | None  # None in a world of one
    me: Member
    membership: Membership
    timeout_s: float
    presence: Mapping[int, Presence] = field(default_factory=dict)  # what is known of the others
    newest: Callable[[], Membership | None] = lambda: None  # what the coordinator has announced
    _created: dict[tuple[int, ...], int] = field(default_factory=dict)
    _linked: set[int] = field(default_factory=set)  # neighbours
    _link_mus: dict[int, threading.Lock] = field(default_factory=dict)  # by rank
    _followers: weakref.WeakSet[Follower] = field(default_factory=weakref.WeakSet)

    def link_neighbours(self) -> None:
        """Link to every process of the job on this host. Blocks until all of them answered."""
        neighbours = [
            member
            for member in self.membership.members
            if member.host_id == self.me.host_id and member.rank != self.rank
        ]
        missing = [member for member in neighbours if member.rank not in self._linked]
        for rank, fd in self._link(missing, "local", self.timeout_s, local=True):
            self.engine.add_local_peer(rank, fd)
            self._linked.add(rank)
        self.engine.await_local_peers(self.timeout_s)

    def link(self, member: Member) -> None:
        """Link to a member of this host that came later; without effect if that is done."""
        if member.host_id != self.me.host_id or member.rank == self.rank:
            return
        with self._link_mus.setdefault(member.rank, threading.Lock()):  # threads may meet here
            if member.rank in self._linked:
                return
            ((rank, fd),) = self._link([member], "local", self.timeout_s, local=True)
            self.engine.add_local_peer(rank, fd)
            self.engine.await_local_peers(self.timeout_s, [rank])
            self._linked.add(rank)

    def is_linked(self, rank: int) -> bool:
        """Say whether a process is of this host, and its memory can be seen."""
        return rank in self._linked

    # -- changes of the membership ------------------------------------------------------------

    def worker_group(self, name: str) -> Group:
        """Return a group of all workers that follows every change of them.

        It is formed when it is first used, and again after each change: a newcomer may make it
        later than the others do.
        """
        from paceline.collectives.following import FollowingGroup

        return FollowingGroup(self, name)

    def seen(self, membership: Membership) -> Membership:
        """Return a membership as far as it concerns this fabric: all of it (column.py)."""
        return membership

    def follow(self, group: Follower) -> None:
        """Let a group know of changes, for as long as it lives."""
        self._followers.add(group)

    def adopt(
        self, membership: Membership, lost: Collection[int] = (), *, forgets: bool = True
    ) -> None:
        """Take over another membership; links to newcomers are made when they are needed.

        Those who are `lost`, and did not leave in good order, are ended if they are of this host:
        one that was only stopped could still write to memory that we share. `forgets`: what is
        held of those who are gone is dropped; otherwise `forget` does it later.
        """
        here = self.me.host_id
        gone = [m for m in self.membership.members if m.rank not in membership.ranks]
        for member in gone:
            if member.rank in lost and member.rank in self._linked:
                self.engine.end_peer(member.rank)
        self.membership = membership
        for group in list(self._followers):
            group.follow(membership)
        for member in gone if forgets else ():
            self.forget(member.rank)
        self.engine.set_num_local(sum(m.host_id == here for m in membership.members))

    def forget(self, rank: int) -> None:
        """Drop what is held of a neighbour that is gone."""
        if rank in self._linked:
            self._linked.discard(rank)
            self.engine.forget_peer(rank)

    def interrupt(self, rank: int, text: str) -> None:
        """End what waits for somebody who is lost. Called from the control thread."""
        for group in list(self._followers):
            group.interrupt(rank, text)

    def next_id(self, ranks: Sequence[int]) -> int:
        """Return the identity of the next group of these ranks: the same on all of its members,
        as long as they create groups of the same ranks in the same order."""
        key = tuple(ranks)
        self._created[key] = self._created.get(key, 0) + 1
        return identity(f"{','.join(map(str, key))}/{self._created[key]}")

    def create_group(
        self,
        group_id: int,
        generation: int,
        membership: Membership,
        ranks: Sequence[int],
        timeout_s: float,
    ) -> _core.Group:
        """Form the group in the engine and connect its members. Collective among the ranks."""
        members = [self.me if r == self.rank else membership.member(r) for r in ranks]
        host_ids = list(dict.fromkeys(member.host_id for member in members))
        hosts = [host_ids.index(member.host_id) for member in members]
        group = self._form(members, group_id, generation, hosts, timeout_s)
        here = self.me.host_id
        remote = [member for member in members if member.host_id != here]
        for lane, name in enumerate(LANES):
            purpose = f"group {group_id:x} generation {generation} {name}"
            for rank, fd in self._link(remote, purpose, timeout_s, local=False):
                group.add_channel(list(ranks).index(rank), lane, fd)
        return group

    def _form(
        self,
        members: Sequence[Member],
        group_id: int,
        generation: int,
        hosts: list[int],
        timeout_s: float,
    ) -> _core.Group:
        """Form the part of a group that is on this host, in short steps, as above.

        First at once: one that has done its part, and left the job since, is no obstacle.
        """
        ranks, others = [m.rank for m in members], [m for m in members if m.rank != self.rank]
        deadline_s, step_s = time.monotonic() + timeout_s, _AT_ONCE_S
        notice = WaitNotice(
            f"rank {self.rank} waits for ranks {ranks} to form a group",
            "forming a group",
            [one.rank for one in others],
        )
        while True:
            try:
                return _core.Group(
                    self.engine, group_id, generation, ranks, hosts, timeout_s, step_s
                )
            except PeerTimeout:
                if time.monotonic() >= deadline_s:
                    raise
            self._require_presence(others)
            self._require_newest(others)
            notice.check()
            step_s = _STEP_S

    def _link(
        self, members: Sequence[Member], purpose: str, timeout_s: float, *, local: bool
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

            try:
                fds.append((member.rank, self._patiently(link, member, members, timeout_s)))
            except BaseException:
                for _, fd in fds:
                    os.close(fd)
                raise
        return fds

    def _patiently(
        self,
        link: Callable[[float], int],
        member: Member,
        members: Sequence[Member],
        timeout_s: float,
    ) -> int:
        """Link in short steps: somebody who is gone is noticed, and a long wait says on whom."""
        deadline_s = time.monotonic() + timeout_s
        notice = WaitNotice(
            f"rank {self.rank} waits for rank {member.rank} ({member.where}) to form a group",
            "forming a group",
            [member.rank],
        )
        while True:
            self._require_presence(members)
            self._require_newest(members)
            try:
                return link(min(_STEP_S, max(deadline_s - time.monotonic(), 0.1)))
            except (ConnectError, RendezvousError):
                if time.monotonic() >= deadline_s:
                    raise
            notice.check()

    def _require_newest(self, members: Sequence[Member]) -> None:
        """Give up a group that some of its members will never form: they know better already."""
        newest = self.newest()
        if newest is None or newest.generation <= self.membership.generation:
            return
        gone = [member.rank for member in members if member.rank not in newest.ranks]
        if gone:
            raise GenerationChanged(
                f"rank {self.rank}: ranks {gone} are not in generation {newest.generation} any more"
            )

    def _require_presence(self, members: Sequence[Member]) -> None:
        known = [self.presence[member.rank] for member in members if member.rank in self.presence]
        gone = [presence for presence in known if presence.state in ("lost", "left")]
        # Those who left because somebody was lost are not the ones to be named.
        for presence in sorted(gone, key=lambda presence: presence.state != "lost"):
            raise PeerLost(
                f"rank {self.rank}: rank {presence.rank} is gone: {presence.detail}; a group with"
                " it cannot be formed",
                rank=presence.rank,
            )


def identity(name: str) -> int:
    """Return the number under which the engine knows a group."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
