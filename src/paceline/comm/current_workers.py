"""A group of all workers, whoever they are at the moment.

After a change of the membership it is formed anew, but only when somebody uses it: a newcomer comes
to that place in its script later than the others. Until a newcomer is admitted it is alone in its
groups.
"""

from __future__ import annotations

from typing import Any

from paceline import _core
from paceline.comm.fabric import Fabric, identity
from paceline.comm.group import Group
from paceline.control.member import Membership


class FollowingGroup(Group):
    """Made by `Fabric.worker_group`."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self._fabric = fabric
        self._id = identity(name)
        self.timeout_s = fabric.timeout_s
        self._core: Any = _Unformed(self)
        self._take_seats(fabric.membership)
        fabric.follow(self)

    def _take_seats(self, membership: Membership) -> None:
        workers, me = membership.workers, self._fabric.rank
        self._seat(workers if me in workers else (me,), membership.workers_since)

    def follow(self, membership: Membership) -> None:
        """Be formed anew, when next used, if the workers are not the same any more."""
        membership = self._fabric.seen(membership)
        if membership.workers_since <= self.generation and self._fabric.rank in self.ranks:
            return
        old = self._core
        if not isinstance(old, _Unformed):
            old.fail(self._words(membership))
            old.close()
        self._core = _Unformed(self)
        self._take_seats(membership)

    def interrupt(self, rank: int, text: str) -> None:
        """End what is in flight if that rank is a member. From any thread."""
        core = self._core
        if rank in self.ranks and not isinstance(core, _Unformed):
            core.fail(text)

    def form(self) -> _core.Group:
        """Form the group among the workers of the fabric's membership. Collective."""
        membership = self._fabric.membership
        core = self._make_core(membership)
        self._core = core
        return core

    def _words(self, membership: Membership) -> str:
        return (
            f"rank {self._fabric.rank}: the membership changed to generation"
            f" {membership.generation}; repeat the operation in the new group"
        )


class _Unformed:
    """Stands for the engine's group until it is used."""

    def __init__(self, group: FollowingGroup) -> None:
        self._group = group

    def fail(self, text: str) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """Nothing is held."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group.form(), name)
