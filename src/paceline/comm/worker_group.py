"""A group of the workers of the current generation.

After a change of the membership the group is formed again, but only when it is next used: a
newcomer reaches that line of its script later than the other workers. Until a newcomer is admitted,
its worker groups contain only the newcomer.
"""

from __future__ import annotations

from typing import Any

from paceline import _core
from paceline.comm.fabric import Fabric, group_id_of
from paceline.comm.group import Group
from paceline.control.member import Membership


class WorkerGroup(Group):
    """A group that follows the membership; created by `Fabric.worker_group`."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self._fabric = fabric
        self._id = group_id_of(name)
        self.timeout_s = fabric.timeout_s
        self._core: Any = _Unformed(self)
        self._set_workers(fabric.membership)
        fabric.add_follower(self)

    def _set_workers(self, membership: Membership) -> None:
        workers, me = membership.workers, self._fabric.rank
        self._set_members(workers if me in workers else (me,), membership.workers_since)

    def follow(self, membership: Membership) -> None:
        """Form the group again when it is next used, if the workers have changed."""
        membership = self._fabric.restrict(membership)
        if membership.workers_since <= self.generation and self._fabric.rank in self.ranks:
            return
        old = self._core
        if not isinstance(old, _Unformed):
            old.fail(
                f"rank {self._fabric.rank}: the membership changed to generation"
                f" {membership.generation}; repeat the operation in the new group"
            )
            old.close()
        self._core = _Unformed(self)
        self._set_workers(membership)

    def interrupt(self, rank: int, text: str) -> None:
        """End the operations in flight if that rank is a member. Callable from any thread."""
        core = self._core
        if rank in self.ranks and not isinstance(core, _Unformed):
            core.fail(text)

    def form(self) -> _core.Group:
        """Form the group among the workers of the fabric's membership. Collective."""
        membership = self._fabric.membership
        core = self._make_core(membership)
        self._core = core
        return core


class HostWorkers(WorkerGroup):
    """The workers of this host."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        super().__init__(fabric, f"{name} on {fabric.me.host_id}")

    def _set_workers(self, membership: Membership) -> None:
        here, me = self._fabric.me.host_id, self._fabric.rank
        workers = [rank for rank in membership.workers if membership.member(rank).host_id == here]
        present = tuple(workers) if me in workers else (me,)
        self._set_members(present, membership.workers_since)


class _Unformed:
    """Placeholder for the engine's group: forms it at the first use."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def fail(self, text: str) -> None:
        """Do nothing: no operation is in flight."""

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group.form(), name)
