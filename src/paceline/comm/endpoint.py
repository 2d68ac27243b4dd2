"""Endpoint: one process's engine, and its links to the other processes of the job.

Neighbours (processes with the same `host_id`) are linked once per process with a Unix socket. The
engine passes shared memory over it and detects from it that the neighbour died. Members on other
hosts get up to two TCP connections per group, one for collectives and one for point-to-point
traffic, so that neither can block the other. In a group of more than two they are opened when they
are first needed (lazy_channels.py); in a group of two the lower rank connects at once. A link is
authenticated before the engine gets it, and encrypted by the engine if it leaves the machine.

Which processes count as the job is decided in fabric.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline import _core
from paceline.comm.device_staging import GroupStaging
from paceline.comm.lazy_channels import LANES, LazyChannels, LazyGroup, for_core, purpose_of
from paceline.control.member import Member
from paceline.control.messages import Presence
from paceline.control.transport.link_encryption import Link
from paceline.control.transport.peer_connections import LinkListener
from paceline.control.wait_notice import WaitNotice
from paceline.errors import ConnectError, PeerLost, PeerTimeout, RendezvousError

_STEP_S = 0.5
_FIRST_STEP_S = 1e-3
_LAST_TRY_S = 0.1  # for what a member should have sent before it left
_MANY_NEIGHBOURS = 16  # from then on one process introduces all others to each other
_CONNECT_STEPS = 10  # steps of one connect: checking the members must not abort a handshake

# Raises if a group of these members will never be formed, because the membership has changed.
MembershipCheck = Callable[[Sequence[Member]], None]


@dataclass
class Endpoint:
    """One process's engine, and the listener and links that reach the other processes."""

    rank: int
    engine: _core.Engine
    listener: LinkListener | None  # None in a world of one
    me: Member
    timeout_s: float
    presence: Mapping[int, Presence] = field(default_factory=dict)  # state of the other ranks
    liveness_s: float = 5.0  # a peer that does not answer for this long counts as lost
    _linked: set[int] = field(default_factory=set)  # neighbours
    _lazy: LazyChannels | None = None
    _link_mus: dict[int, threading.Lock] = field(default_factory=dict)  # by rank

    def __post_init__(self) -> None:
        self.staging = GroupStaging(self.rank)  # for tensors on a device

    def link_neighbours(self, members: Sequence[Member]) -> None:
        """Link to all of these processes on this host. Blocks until all of them have answered.

        Each two of them shake hands. On a host with many, only the lowest rank does so with each of
        the others: it then passes each two of them the ends of a socket.
        """
        missing = [
            member
            for member in members
            if self._is_neighbour(member) and member.rank not in self._linked
        ]
        hub = min([self.me, *missing], key=lambda member: member.rank)
        is_introduced = len(missing) >= _MANY_NEIGHBOURS
        callers = [hub] if is_introduced and hub is not self.me else missing
        for rank, link in self._link(callers, "local", self.timeout_s, _no_check, local=True):
            self.engine.add_local_peer(rank, link.fd)
            self._linked.add(rank)
        if is_introduced:
            self._introduce(hub, [member.rank for member in missing])
        self.engine.await_local_peers(self.timeout_s)

    def _introduce(self, hub: Member, ranks: Sequence[int]) -> None:
        """Introduce these neighbours to each other as the hub, or wait until the hub has."""
        self.engine.await_local_peers(self.timeout_s, ranks if hub is self.me else [hub.rank])
        if hub is self.me:
            self.engine.introduce_neighbours(self.timeout_s)
            return
        deadline_s = time.monotonic() + self.timeout_s
        text = f"rank {self.rank} waits for rank {hub.rank} ({hub.where}), which connects this host"
        notice = WaitNotice(text, "forming a group", [hub.rank])
        while not self.engine.await_introductions(hub.rank, ranks, _STEP_S):
            self._require_presence([hub])
            if time.monotonic() >= deadline_s:
                raise PeerTimeout(f"{text}: not in {self.timeout_s:g} s", rank=hub.rank)
            notice.check()
        self._linked.update(ranks)

    def link(self, member: Member, check_membership: MembershipCheck) -> None:
        """Link to a member of this host that joined later; without effect if it is linked."""
        if not self._is_neighbour(member):
            return
        with self._link_mus.setdefault(member.rank, threading.Lock()):  # several threads may link
            if member.rank in self._linked:
                return
            ((rank, link),) = self._link(
                [member], "local", self.timeout_s, check_membership, local=True
            )
            self.engine.add_local_peer(rank, link.fd)
            self.engine.await_local_peers(self.timeout_s, [rank])
            self._linked.add(rank)

    def can_link(self, member: Member) -> bool:
        """Return whether `link` would not wait for this member of this host to connect."""
        if member.rank in self._linked or self.rank < member.rank:
            return True
        assert self.listener is not None, "a world of one has no other members"
        return self.listener.has_arrived(member.rank, "local")

    def _is_neighbour(self, member: Member) -> bool:
        return member.host_id == self.me.host_id and member.rank != self.rank

    def is_linked(self, rank: int) -> bool:
        """Return whether a process runs on this host and shares its engine memory with this one."""
        return rank in self._linked

    def kill(self, rank: int) -> None:
        """Kill a lost process of this host: if it was only stopped, it could still write to memory
        that it shares with this process."""
        if rank in self._linked:
            self.engine.end_peer(rank)

    def forget(self, rank: int) -> None:
        """Release the resources of a neighbour that is gone."""
        if rank in self._linked:
            self._linked.discard(rank)
            self.engine.forget_peer(rank)

    def create_group(
        self,
        group_id: int,
        generation: int,
        members: Sequence[Member],
        timeout_s: float,
        check_membership: MembershipCheck,
        lanes: Sequence[str] = LANES,
    ) -> _core.Group:
        """Create the group in the engine and connect its members. Collective among the ranks.

        `lanes`: of a group of two, which is connected at once, those that it is going to use.
        """
        for member in members:
            self.link(member, check_membership)
        host_ids = list(dict.fromkeys(member.host_id for member in members))
        hosts = [host_ids.index(member.host_id) for member in members]
        group = self._form(members, group_id, generation, hosts, timeout_s, check_membership)
        ranks = [member.rank for member in members]
        remote = [member for member in members if member.host_id != self.me.host_id]
        if self._is_lazy(members):
            self._open_lazily(group, group_id, generation, members, timeout_s, check_membership)
            return group
        for name in lanes:
            lane, purpose = LANES.index(name), purpose_of(group_id, generation, name)
            for rank, link in self._link(remote, purpose, timeout_s, check_membership, local=False):
                group.add_channel(ranks.index(rank), lane, link.fd, for_core(link.keys))
        return group

    def _is_lazy(self, members: Sequence[Member]) -> bool:
        is_remote = any(member.host_id != self.me.host_id for member in members)
        return len(members) > 2 and is_remote

    def _open_lazily(
        self,
        group: _core.Group,
        group_id: int,
        generation: int,
        members: Sequence[Member],
        timeout_s: float,
        check_membership: MembershipCheck,
    ) -> None:
        """Let the group's channels be opened when they are first needed."""

        def check(member: Member) -> bool:
            has_left = self._has_finished(member)
            self._require_presence([member])
            check_membership(members)
            return has_left

        if self._lazy is None:
            assert self.listener is not None, "a world of one has no other members"
            self._lazy = LazyChannels(self.me, self.engine, self.listener, self.liveness_s)
        self._lazy.add(group, LazyGroup((group_id, generation), members, timeout_s, check))

    def has_called(
        self, member: Member, group_id: int, generation: int, lanes: Sequence[str]
    ) -> bool:
        """Return whether a group with this member can be formed without waiting for it to connect:
        it has connected, or this process connects."""
        if self._is_neighbour(member):
            return self.can_link(member)
        if self.rank < member.rank:
            return True
        assert self.listener is not None, "a world of one has no other members"
        purposes = [purpose_of(group_id, generation, name) for name in lanes]
        return all(self.listener.has_arrived(member.rank, purpose) for purpose in purposes)

    def _form(
        self,
        members: Sequence[Member],
        group_id: int,
        generation: int,
        hosts: list[int],
        timeout_s: float,
        check_membership: MembershipCheck,
    ) -> _core.Group:
        """Form the part of a group that is on this host, in short steps.

        The first member on this host allocates the shared memory; the others wait only for it.
        """
        ranks, others = [m.rank for m in members], [m for m in members if m.rank != self.rank]
        deadline_s, step_s = time.monotonic() + timeout_s, _FIRST_STEP_S
        notice = WaitNotice(
            f"rank {self.rank} waits for ranks {ranks} to form a group",
            "forming a group",
            [one.rank for one in others],
        )
        first = next(member for member in members if member.host_id == self.me.host_id)
        while True:
            has_left = self._has_finished(first)
            try:
                return _core.Group(
                    self.engine,
                    group_id,
                    generation,
                    ranks,
                    hosts,
                    timeout_s,
                    step_s,
                    self._is_lazy(members),
                )
            except PeerTimeout:
                if has_left:
                    raise self._peer_lost(first.rank) from None
                if time.monotonic() >= deadline_s:
                    raise
            self._require_presence(others)
            check_membership(others)
            notice.check()
            step_s = _STEP_S

    def _link(
        self,
        members: Sequence[Member],
        purpose: str,
        timeout_s: float,
        check_membership: MembershipCheck,
        *,
        local: bool,
    ) -> list[tuple[int, Link]]:
        if not members:
            return []
        assert self.listener is not None, "a world of one has no other members"
        listener, links = self.listener, list[tuple[int, Link]]()
        # All connects first: they need no cooperation of the peer, so ranks cannot deadlock.
        for member in sorted(members, key=lambda member: member.rank < self.rank):

            def link(step_s: float, member: Member = member) -> Link:
                if self.rank < member.rank:
                    return listener.connect(member, purpose, local, _CONNECT_STEPS * step_s)
                return listener.accepted(member.rank, purpose, step_s)

            def check() -> None:
                self._require_presence(members)
                check_membership(members)

            try:
                links.append((member.rank, self._link_in_steps(link, member, check, timeout_s)))
            except BaseException:
                for _, made in links:
                    os.close(made.fd)
                raise
        return links

    def _link_in_steps(
        self,
        link: Callable[[float], Link],
        member: Member,
        check: Callable[[], None],
        timeout_s: float,
    ) -> Link:
        """Link in short steps, to detect that the member is gone and to log a long wait."""
        deadline_s = time.monotonic() + timeout_s
        notice = WaitNotice(
            f"rank {self.rank} waits for rank {member.rank} ({member.where}) to form a group",
            "forming a group",
            [member.rank],
        )
        while True:
            has_left = self._has_finished(member)
            check()
            try:
                step_s = _LAST_TRY_S if has_left else _STEP_S
                return link(min(step_s, max(deadline_s - time.monotonic(), _LAST_TRY_S)))
            except (ConnectError, RendezvousError):
                if has_left:
                    raise self._peer_lost(member.rank) from None
                if time.monotonic() >= deadline_s:
                    raise
            notice.check()

    def _require_presence(self, members: Sequence[Member]) -> None:
        """Raise PeerLost if one of the members was lost, or left before its work was done.

        A member that has finished is accepted: it may have done its part before it left.
        """
        known = [self.presence[member.rank] for member in members if member.rank in self.presence]
        gone = [presence for presence in known if presence.is_gone and not presence.has_finished]
        # Name a lost member first: the members that left because of that loss are not the cause.
        for presence in sorted(gone, key=lambda presence: presence.state != "lost"):
            raise self._peer_lost(presence.rank)

    def _has_finished(self, member: Member) -> bool:
        """Return whether a member has finished and left. What it sent to this process has arrived
        by then: if one more try does not find it, the member never sent it."""
        presence = self.presence.get(member.rank)
        return presence is not None and presence.has_finished

    def _peer_lost(self, rank: int) -> PeerLost:
        words = self.presence[rank].text
        return PeerLost(
            f"rank {self.rank}: rank {rank} is gone: {words}; a group with it cannot be formed",
            rank=rank,
        )


def _no_check(_: Sequence[Member]) -> None:
    """Accept: the first members of a job do not change while they are linked."""
