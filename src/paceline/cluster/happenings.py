"""What a change of the membership means to people: from two memberships to typed events."""

from __future__ import annotations

from collections import defaultdict

from paceline.cluster import messages as m
from paceline.cluster.member import Membership
from paceline.telemetry.events import (
    Filled,
    Happening,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Moved,
    Promoted,
)


def happenings(before: Membership | None, changed: m.Changed) -> list[Happening]:
    """Say what happened between a membership and the one that follows it."""
    if before is None:
        return []  # the job has begun, which everybody sees
    now, found = changed.membership, list[Happening]()
    lost = {loss.rank for loss in changed.lost}
    generation = now.generation
    for loss in changed.lost:
        place = (loss.role, loss.number, loss.rank, loss.where)
        found.append(MemberLost(*place, loss.why, generation))
    for one in before.members:
        if one.rank not in now.ranks and one.rank not in lost:
            found.append(MemberLeft(one.role, one.number, one.rank, one.where, generation))
    found += _of_partitions(before, now)
    for rank in changed.joined:
        one = now.member(rank)
        found.append(MemberJoined(one.role, one.number, one.rank, one.where, generation))
    return found


def _of_partitions(before: Membership, now: Membership) -> list[Happening]:
    promoted: dict[int, list[int]] = defaultdict(list)
    moved: dict[tuple[int, int], list[int]] = defaultdict(list)
    filled: dict[int, list[int]] = defaultdict(list)
    for partition, (was, now_held) in enumerate(
        zip(before.partitions, now.partitions, strict=True)
    ):
        if was[:1] != now_held[:1] and now_held:
            if was[0] in now.ranks:
                moved[was[0], now_held[0]].append(partition)
            else:
                promoted[now_held[0]].append(partition)
        for rank in now_held:
            if rank not in was:
                filled[rank].append(partition)
    generation = now.generation

    def number(rank: int) -> int:
        return (now if rank in now.ranks else before).member(rank).number

    return [
        *(Promoted(number(r), tuple(ps), generation) for r, ps in promoted.items()),
        *(Filled(number(r), tuple(ps), generation) for r, ps in filled.items()),
        *(
            Moved(number(source), number(target), tuple(ps), generation)
            for (source, target), ps in moved.items()
        ),
    ]
