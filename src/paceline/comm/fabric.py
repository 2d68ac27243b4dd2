"""Fabric: the processes that groups are formed from, reached through this process's endpoint.

A fabric is an endpoint (endpoint.py) and a SCOPE: the processes that count as the job. There are
three scopes:

    JobScope           all processes of the job
    DataParallelScope  on a mesh (runtime/mesh.py): the workers that hold the same part of the
                       model, and all servers. These workers average gradients and transfer state
                       among themselves, and the code that does so treats them as the job
    UnitScope          on a mesh: the workers that together hold one copy of the model. A unit
                       never changes: it is lost as a whole and replaced by another unit. Its
                       groups therefore need not follow the membership, and they can be formed
                       before a running job admits its processes: the newcomers split their model
                       together, and only then report that they are ready

In an elastic job the membership changes. `enter_generation()` kills lost processes of this host,
because they could still write to memory that they share with this process, and the groups of all
workers follow. Newcomers are linked when a group needs them. The control thread calls
`interrupt()`: it ends operations that wait for a lost rank.
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
from paceline.comm.lazy_channels import LANES
from paceline.control.member import Member, Membership
from paceline.errors import GenerationChanged

if TYPE_CHECKING:
    from paceline.comm.group import Group


class Follower(Protocol):
    """A group that follows changes of the membership."""

    def follow(self, membership: Membership) -> None:
        """Form the group again from these members when it is next used."""

    def interrupt(self, rank: int, text: str) -> None:
        """End the operations in flight if that rank is a member."""


class Scope(Protocol):
    """The processes that count as the job."""

    name: str  # part of the names of this scope's worker groups; "" for the whole job

    @property
    def membership(self) -> Membership:
        """The processes that count, in the generation that this process has entered."""

    def newest(self) -> Membership | None:
        """Return the membership that the coordinator announced last; None if it does not concern
        this scope."""

    def restrict(self, membership: Membership) -> Membership:
        """Return the part of a membership of the whole job that is in this scope."""


@dataclass
class JobScope:
    """All processes of the job."""

    membership: Membership
    announced: Callable[[], Membership | None] = lambda: None
    name: str = ""
    num_created: dict[tuple[int, ...], int] = field(default_factory=dict)  # groups, by ranks
    followers: weakref.WeakSet[Follower] = field(default_factory=weakref.WeakSet)

    def newest(self) -> Membership | None:
        """Return the membership that the coordinator announced last."""
        return self.announced()

    def restrict(self, membership: Membership) -> Membership:
        """Return the membership unchanged."""
        return membership


class DataParallelScope:
    """The workers with the given numbers, and all servers."""

    def __init__(self, job: JobScope, numbers: Sequence[int], name: str) -> None:
        self._job = job
        self._numbers = numbers if isinstance(numbers, range) else frozenset(numbers)
        self.name = name
        self._last: tuple[Membership, Membership] | None = (
            None  # the last input and output of `restrict`
        )

    @property
    def membership(self) -> Membership:
        """The job's membership without the workers of other data-parallel groups."""
        return self.restrict(self._job.membership)

    def newest(self) -> Membership | None:
        """Return the membership that the coordinator announced last, with all workers."""
        return self._job.newest()

    def restrict(self, membership: Membership) -> Membership:
        """Return a membership without the workers of other data-parallel groups."""
        if self._last is None or self._last[0] is not membership:
            here = [
                member
                for member in membership.members
                if member.role != "worker" or member.number in self._numbers
            ]
            part = msgspec.structs.replace(membership, members=tuple(here))
            self._last = (membership, part)
        return self._last[1]


class UnitScope:
    """The workers of one unit; its generation is always 1."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.membership = Membership(1, tuple(sorted(members, key=lambda member: member.rank)))
        self.name = "unit"

    def newest(self) -> Membership | None:
        """Return None: changes of the job do not concern a unit."""
        return None

    def restrict(self, membership: Membership) -> Membership:  # noqa: ARG002
        """Return the unit's members."""
        return self.membership


class Fabric:
    """A process's endpoint, and the scope that its groups are formed in."""

    def __init__(self, endpoint: Endpoint, job: JobScope, scope: Scope | None = None) -> None:
        self.endpoint = endpoint
        self.rank = endpoint.rank
        self.engine = endpoint.engine
        self.staging = endpoint.staging
        self.listener = endpoint.listener
        self.me = endpoint.me
        self.timeout_s = endpoint.timeout_s
        self.presence = endpoint.presence
        self.job = job
        self._scope: Scope = job if scope is None else scope

    def data_parallel_view(self, numbers: Sequence[int], name: str) -> Fabric:
        """Return the fabric restricted to the workers with these numbers, and the servers."""
        return Fabric(self.endpoint, self.job, DataParallelScope(self.job, numbers, name))

    def unit_view(self, members: Sequence[Member]) -> Fabric:
        """Return the fabric restricted to the members of one unit."""
        return Fabric(self.endpoint, self.job, UnitScope(members))

    @property
    def membership(self) -> Membership:
        """The processes that count as the job, in the generation that this process has entered."""
        return self._scope.membership

    def newest(self) -> Membership | None:
        """Return the membership that the coordinator announced last; None if it does not concern
        this fabric's scope."""
        return self._scope.newest()

    def restrict(self, membership: Membership) -> Membership:
        """Return the part of a membership of the whole job that is in this fabric's scope."""
        return self._scope.restrict(membership)

    def link_neighbours(self) -> None:
        """Link to every process of the job on this host. Blocks until all of them have answered."""
        self.endpoint.link_neighbours(self.membership.members)

    def link(self, member: Member) -> None:
        """Link to a member of this host that joined later; without effect if it is linked."""
        self.endpoint.link(member, self._require_newest)

    def is_linked(self, rank: int) -> bool:
        """Return whether a process runs on this host and shares its engine memory with this one."""
        return self.endpoint.is_linked(rank)

    # -- groups -------------------------------------------------------------------------------

    def worker_group(self, name: str) -> Group:
        """Return a group of all workers that follows every change of the membership.

        It is formed when it is first used, and again after each change: a newcomer may create it
        later than the other workers.
        """
        from paceline.comm.worker_group import WorkerGroup

        return WorkerGroup(self, f"{name} of {self._scope.name}" if self._scope.name else name)

    def next_id(self, ranks: Sequence[int]) -> int:
        """Return the id of the next group of these ranks. All members get the same id if they
        create groups of the same ranks in the same order."""
        key, created = tuple(ranks), self.job.num_created
        created[key] = created.get(key, 0) + 1
        return group_id_of(f"{','.join(map(str, key))}/{created[key]}")

    def create_group(
        self,
        group_id: int,
        generation: int,
        membership: Membership,
        ranks: Sequence[int],
        timeout_s: float,
        lanes: Sequence[str] = LANES,
    ) -> _core.Group:
        """Create the group in the engine and connect its members. Collective among the ranks."""
        members = [self.me if r == self.rank else membership.member(r) for r in ranks]
        return self.endpoint.create_group(
            group_id, generation, members, timeout_s, self._require_newest, lanes
        )

    def _require_newest(self, members: Sequence[Member]) -> None:
        """Raise GenerationChanged if a newer membership lacks some of the members: they will never
        form this group."""
        newest = self.newest()
        if newest is None or newest.generation <= self.membership.generation:
            return
        gone = [member.rank for member in members if member.rank not in newest.ranks]
        if gone:
            raise GenerationChanged(
                f"rank {self.rank}: ranks {gone} are not in generation {newest.generation} any more"
            )

    # -- changes of the membership ------------------------------------------------------------

    def watch_announcements(self, announced: Callable[[], Membership | None]) -> None:
        """Use this function to learn which membership the coordinator announced last."""
        self.job.announced = announced

    def add_follower(self, group: Follower) -> None:
        """Notify a group of changes of the membership for as long as it lives."""
        self.job.followers.add(group)

    def enter_generation(
        self, membership: Membership, lost: Collection[int] = (), *, forgets: bool = True
    ) -> None:
        """Replace the membership of the whole job by a newer one.

        `lost` are members that did not leave cleanly: those of this host are killed. With
        `forgets` the resources of departed members are released now; otherwise the caller
        releases them later with `forget`.
        """
        gone = [m for m in self.job.membership.members if m.rank not in membership.ranks]
        for member in gone:
            if member.rank in lost:
                self.endpoint.kill(member.rank)
        self.job.membership = membership
        for group in list(self.job.followers):
            group.follow(membership)
        for member in gone if forgets else ():
            self.forget(member.rank)
        here = self.me.host_id
        self.engine.set_num_local(sum(m.host_id == here for m in membership.members))

    def forget(self, rank: int) -> None:
        """Release the resources of a process of this host that is gone."""
        self.endpoint.forget(rank)

    def interrupt(self, rank: int, text: str) -> None:
        """End operations that wait for a lost rank. Called from the control thread."""
        for group in list(self.job.followers):
            group.interrupt(rank, text)


def group_id_of(name: str) -> int:
    """Return the number by which the engine identifies a group."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
