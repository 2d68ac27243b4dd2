"""Adoption: which members work in the present generation. Pure.

Calm changes (changes.py) wait until all of them do. A worker counts as working in the present
generation when it works in one with the present workers: where partitions are it finds out by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.control.member import Member, Membership
from paceline.control.membership.changes import who

_PATIENCE_S = 2.0  # then the reason why a newcomer waits is printed


class Adoption:
    """What members have said about it."""

    def __init__(self) -> None:
        self._adopted: dict[int, int] = {}  # rank -> generation
        self._waiting_s: float | None = None  # since when newcomers wait for others

    def note(self, rank: int, generation: int) -> bool:
        """Take in in which generation a member works; return whether that is news."""
        is_news = generation > self._adopted.get(rank, 0)
        if is_news:
            self._adopted[rank] = generation
        return is_news

    def forget(self, rank: int) -> None:
        self._adopted.pop(rank, None)

    def late(self, now: Membership, is_here: Callable[[int], bool]) -> list[Member]:
        """Return the members on which calm changes wait."""
        return [
            one
            for one in now.members
            if is_here(one.rank)
            and self._adopted.get(one.rank, 0)
            < (now.workers_since if one.role == "worker" else now.generation)
        ]

    def settled(self) -> None:
        """Begin to count anew: a change was published."""
        self._waiting_s = None

    def explain(
        self, newcomers: Mapping[int, Member], late: list[Member], generation: int, now_s: float
    ) -> str:
        """Return once, after a while, the words for whom newcomers wait; else ""."""
        if not newcomers or self._waiting_s is None:
            self._waiting_s = now_s if newcomers else None
            return ""
        if now_s - self._waiting_s < _PATIENCE_S or not late:
            return ""
        self._waiting_s = float("inf")
        whom = ", ".join(who(one) for one in late)
        names = ", ".join(who(one) for one in newcomers.values())
        return f"{names} will join when {whom} works in generation {generation}"
