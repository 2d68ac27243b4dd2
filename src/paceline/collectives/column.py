"""The job as the holders of one part of a model see it.

On a mesh (mesh.py) gradients are averaged, and states handed over, among the workers with the same
place in their units. To all that does so they are the job: this is the fabric of a job that has no
other workers. Servers are everybody's; links, memory and the engine are the process's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from paceline.cluster.member import Membership
from paceline.collectives.group import Group
from paceline.collectives.topology import Fabric


class Column(Fabric):
    """A fabric with some of the workers: those whose numbers are given."""

    def __init__(self, whole: Fabric, numbers: Sequence[int], name: str) -> None:
        # Not made as a fabric: what is not here is the whole one's.
        self._whole = whole
        self._numbers = numbers if isinstance(numbers, range) else frozenset(numbers)
        self._name = name
        self._seen: tuple[Membership, Membership] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    @property
    def membership(self) -> Membership:  # type: ignore[override]
        return self.seen(self._whole.membership)

    @property
    def newest(self) -> Callable[[], Membership | None]:
        return self._whole.newest

    @newest.setter
    def newest(self, newest: Callable[[], Membership | None]) -> None:
        self._whole.newest = newest

    def seen(self, membership: Membership) -> Membership:
        """Return a membership without the workers of other columns."""
        if self._seen is None or self._seen[0] is not membership:
            here = [
                member
                for member in membership.members
                if member.role != "worker" or member.number in self._numbers
            ]
            part = msgspec.structs.replace(membership, members=tuple(here))
            self._seen = (membership, part)
        return self._seen[1]

    def worker_group(self, name: str) -> Group:
        """Return a group of these workers that follows every change of them."""
        from paceline.collectives.following import FollowingGroup

        return FollowingGroup(self, f"{name} of {self._name}")

    def adopt(
        self, membership: Membership, lost: Collection[int] = (), *, forgets: bool = True
    ) -> None:
        """Take over another membership, in which all workers are."""
        self._whole.adopt(membership, lost, forgets=forgets)
