"""Identities of groups: equal on all members, different for every group."""

from __future__ import annotations

from paceline import _core
from paceline.comm.endpoint import Endpoint
from paceline.comm.fabric import Fabric, WholeJob
from paceline.control.member import Member, Membership


def fabric(rank: int) -> Fabric:
    members = tuple(Member(r, "worker", "host", "here", 1, r, "", "") for r in range(4))
    engine = _core.Engine(rank, 1, 10.0, 5.0, 2.0)
    endpoint = Endpoint(rank, engine, None, members[rank], 10.0)
    return Fabric(endpoint, WholeJob(Membership(1, members)))


def test_members_agree_although_they_form_other_groups_in_between() -> None:
    first, second = fabric(0), fabric(1)
    ids = [first.next_id([0, 1]), first.next_id([0, 2]), first.next_id([0, 1])]
    assert [second.next_id([0, 1]), second.next_id([0, 1])] == [ids[0], ids[2]]


def test_every_group_has_an_identity_of_its_own() -> None:
    one = fabric(0)
    asked = ([0, 1], [1, 0], [0, 1], [0], [0, 1, 2], [0, 1])
    assert len({one.next_id(ranks) for ranks in asked}) == len(asked)


def test_a_column_has_its_workers_and_all_servers_and_follows_the_whole_job() -> None:
    whole = fabric(0)
    workers = [Member(r, "worker", "host", "here", 1, r, "", "", number=r) for r in range(4)]
    server = Member(4, "server", "host", "here", 1, 4, "", "", number=0)
    whole.adopt(Membership(2, (*workers, server)))
    column = whole.column(range(0, 100, 2), "column 0")
    assert column.membership.ranks == (0, 2, 4)
    column.adopt(Membership(3, (*workers[:2], server)), forgets=False)
    assert column.membership.ranks == (0, 4)
    assert whole.membership.ranks == (0, 1, 4)


def test_a_unit_stays_as_it_is_whatever_the_coordinator_announces() -> None:
    whole = fabric(0)
    members = whole.membership.members
    unit = whole.unit([members[1], members[0]])
    whole.listen(lambda: Membership(5, members[:1]))
    assert unit.newest() is None
    assert (unit.membership.ranks, unit.membership.generation) == ((0, 1), 1)
    assert whole.newest() is not None
