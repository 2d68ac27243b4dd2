"""Fabric: the job as some of its processes see it, over this process's endpoint.

A fabric is an endpoint (endpoint.py) and a SCOPE: the processes that count. There are three scopes:

    WholeJob   all processes; `adopt()` takes over another membership
    Column     on a mesh (runtime/mesh.py): the workers that hold the same part of the model.
               Gradients are averaged, and states handed over, among them: to all that does so they
               are the job. Servers are everybody's
    Unit       on a mesh: the workers that hold one copy of the model between them. A unit never
               changes: it is lost as a whole, and replaced by another one. So its groups need not
               follow anybody, and can be formed before its processes are let into a job that is
               under way: newcomers cut their model together, and only then say they are ready

In an elastic job members come and go. `adopt()` ends lost processes of this host (their memory is
ours too), and the groups of all workers follow; newcomers are linked when they are needed.
`interrupt()` comes from the control thread: operations that wait for a lost rank end at once.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from paceline import _core
from paceline.comm.endpoint import Endpoint
from paceline.control.member import Member, Membership
from paceline.errors import GenerationChanged

if TYPE_CHECKING:
    from paceline.comm.group import Group


class Follower(Protocol):
    """A group that goes along with changes of the membership."""

    def follow(self, membership: Membership) -> None:
        """Be formed anew from these members, when next used."""

    def interrupt(self, rank: int, text: str) -> None:
        """End what is in flight if that rank is a member."""


class Scope(Protocol):
    """The processes that count as the job."""

    name: str  # distinguishes the groups of all workers of this scope; "": the whole job

    @property
    def membership(self) -> Membership:
        """The processes that count, in the generation that this process has adopted."""

    def newest(self) -> Membership | None:
        """Return what the coordinator has announced; None: nothing that concerns this scope."""

    def seen(self, membership: Membership) -> Membership:
        """Return a membership of the whole job as far as it concerns this scope."""


@dataclass
class WholeJob:
    """All processes of the job."""

    membership: Membership
    announced: Callable[[], Membership | None] = lambda: None
    name: str = ""
    num_created: dict[tuple[int, ...], int] = field(default_factory=dict)  # groups, by ranks
    followers: weakref.WeakSet[Follower] = field(default_factory=weakref.WeakSet)

    def newest(self) -> Membership | None:
        """Return what the coordinator has announced."""
        return self.announced()

    def seen(self, membership: Membership) -> Membership:
        """Return all of it."""
        return membership


class Column:
    """Some of the workers, those with the given numbers, and all servers."""

    def __init__(self, whole: WholeJob, numbers: Sequence[int], name: str) -> None:
        self._whole = whole
        self._numbers = numbers if isinstance(numbers, range) else frozenset(numbers)
        self.name = name
        self._last: tuple[Membership, Membership] | None = None  # a membership, and what is seen

    @property
    def membership(self) -> Membership:
        """The whole job's, without the workers of other columns."""
        return self.seen(self._whole.membership)

    def newest(self) -> Membership | None:
        """Return what the coordinator has announced, for all workers."""
        return self._whole.newest()

    def seen(self, membership: Membership) -> Membership:
        """Return a membership without the workers of other columns."""
        if self._last is None or self._last[0] is not membership:
            here = [
                member
                for member in membership.members
                if member.role != "worker" or member.number in self._numbers
            ]
            part = msgspec.structs.replace(membership, members=tuple(here))
            self._last = (membership, part)
        return self._last[1]


class Unit:
    """The workers of one unit, in one generation for good."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.membership = Membership(1, tuple(sorted(members, key=lambda member: member.rank)))
        self.name = "unit"

    def newest(self) -> Membership | None:
        """Return None: changes of the job do not concern a unit."""
        return None

    def seen(self, membership: Membership) -> Membership:  # noqa: ARG002
        """Return the unit's members."""
        return self.membership


class Fabric:
    """What groups are formed in: a process's endpoint and the scope of its groups."""

    def __init__(self, endpoint: Endpoint, whole: WholeJob, scope: Scope | None = None) -> None:
        self.endpoint = endpoint
        self.rank = endpoint.rank
        self.engine = endpoint.engine
        self.listener = endpoint.listener
        self.me = endpoint.me
        self.timeout_s = endpoint.timeout_s
        self.presence = endpoint.presence
        self.whole = whole
        self._scope: Scope = whole if scope is None else scope

    def column(self, numbers: Sequence[int], name: str) -> Fabric:
        """Return the job as the workers with these numbers see it."""
        return Fabric(self.endpoint, self.whole, Column(self.whole, numbers, name))

    def unit(self, members: Sequence[Member]) -> Fabric:
        """Return the job as the members of one unit see it."""
        return Fabric(self.endpoint, self.whole, Unit(members))

    @property
    def membership(self) -> Membership:
        """The processes that count."""
        return self._scope.membership

    def newest(self) -> Membership | None:
        """Return what the coordinator has announced."""
        return self._scope.newest()

    def seen(self, membership: Membership) -> Membership:
        """Return a membership of the whole job as far as it concerns this fabric."""
        return self._scope.seen(membership)

    def link_neighbours(self) -> None:
        """Link to every process of the job on this host. Blocks until all of them answered."""
        self.endpoint.link_neighbours(self.membership.members)

    def link(self, member: Member) -> None:
        """Link to a member of this host that came later; without effect if that is done."""
        self.endpoint.link(member, self._require_newest)

    def is_linked(self, rank: int) -> bool:
        """Return whether a process is of this host, and its memory can be seen."""
        return self.endpoint.is_linked(rank)

    # -- groups -------------------------------------------------------------------------------

    def worker_group(self, name: str) -> Group:
        """Return a group of all workers that follows every change of them.

        It is formed when it is first used, and again after each change: a newcomer may make it
        later than the others do.
        """
        from paceline.comm.current_workers import FollowingGroup

        return FollowingGroup(self, f"{name} of {self._scope.name}" if self._scope.name else name)

    def next_id(self, ranks: Sequence[int]) -> int:
        """Return the identity of the next group of these ranks: the same on all of its members,
        as long as they create groups of the same ranks in the same order."""
        key, created = tuple(ranks), self.whole.num_created
        created[key] = created.get(key, 0) + 1
        return identity(f"{','.join(map(str, key))}/{created[key]}")

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
        return self.endpoint.create_group(
            group_id, generation, members, timeout_s, self._require_newest
        )

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

    # -- changes of the membership ------------------------------------------------------------

    def listen(self, announced: Callable[[], Membership | None]) -> None:
        """Learn from now on what the coordinator has announced."""
        self.whole.announced = announced

    def follow(self, group: Follower) -> None:
        """Let a group know of changes, for as long as it lives."""
        self.whole.followers.add(group)

    def adopt(
        self, membership: Membership, lost: Collection[int] = (), *, forgets: bool = True
    ) -> None:
        """Take over another membership of the whole job.

        Members that are `lost`, and did not leave in good order, are ended if they are of this
        host. `forgets`: what is held of members that are gone is dropped; otherwise `forget` does
        it later.
        """
        gone = [m for m in self.whole.membership.members if m.rank not in membership.ranks]
        for member in gone:
            if member.rank in lost:
                self.endpoint.end(member.rank)
        self.whole.membership = membership
        for group in list(self.whole.followers):
            group.follow(membership)
        for member in gone if forgets else ():
            self.forget(member.rank)
        here = self.me.host_id
        self.engine.set_num_local(sum(m.host_id == here for m in membership.members))

    def forget(self, rank: int) -> None:
        """Drop what is held of a neighbour that is gone."""
        self.endpoint.forget(rank)

    def interrupt(self, rank: int, text: str) -> None:
        """End what waits for a lost rank. Called from the control thread."""
        for group in list(self.whole.followers):
            group.interrupt(rank, text)


def identity(name: str) -> int:
    """Return the number under which the engine knows a group."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
