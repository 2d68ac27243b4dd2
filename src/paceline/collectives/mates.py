"""The job as the processes of one unit see it: themselves, from the first moment to the last.

A unit (mesh.py) never changes: it is lost as a whole, and replaced by another one. So its groups
need not follow anybody, and can be formed before its processes are let into a job that is under
way: newcomers cut their model together, and only then say that they are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline import _core
from paceline.cluster.member import Member, Membership
from paceline.collectives.topology import Fabric


class Mates(Fabric):
    """A fabric with the workers of one unit, in one generation for good."""

    def __init__(self, whole: Fabric, members: Sequence[Member]) -> None:
        # Not made as a fabric: what is not here is the whole one's.
        self._whole = whole
        self.membership = Membership(1, tuple(sorted(members, key=lambda member: member.rank)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    @property
    def newest(self) -> Callable[[], Membership | None]:  # type: ignore[override]
        return lambda: None  # others come and go

    def create_group(
        self,
        group_id: int,
        generation: int,
        membership: Membership,
        ranks: Sequence[int],
        timeout_s: float,
    ) -> _core.Group:
        for rank in ranks:
            self.link(membership.member(rank))
        return super().create_group(group_id, generation, membership, ranks, timeout_s)
