"""Identities of groups: equal on all members, different for every group."""

from __future__ import annotations

from paceline import _core
from paceline.cluster.member import Member, Membership
from paceline.collectives.topology import Fabric


def fabric(rank: int) -> Fabric:
    members = tuple(Member(r, "worker", "host", "here", 1, r, "", "") for r in range(4))
    engine = _core.Engine(rank, 1, 10.0, 5.0, 2.0)
    return Fabric(rank, engine, None, members[rank], Membership(1, members), 10.0)


def test_members_agree_although_they_form_other_groups_in_between() -> None:
    first, second = fabric(0), fabric(1)
    ids = [first.next_id([0, 1]), first.next_id([0, 2]), first.next_id([0, 1])]
    assert [second.next_id([0, 1]), second.next_id([0, 1])] == [ids[0], ids[2]]


def test_every_group_has_an_identity_of_its_own() -> None:
    one = fabric(0)
    asked = ([0, 1], [1, 0], [0, 1], [0], [0, 1, 2], [0, 1])
    assert len({one.next_id(ranks) for ranks in asked}) == len(asked)
