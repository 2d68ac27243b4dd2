"""Group ids are equal on all members and differ between groups; scopes restrict the membership."""

from __future__ import annotations

from paceline import _core
from paceline.comm.endpoint import Endpoint
from paceline.comm.fabric import Fabric, JobScope
from paceline.control.member import Member, Membership


def fabric(rank: int) -> Fabric:
    members = tuple(Member(r, "worker", "host", "here", 1, r, "", "") for r in range(4))
    engine = _core.Engine(rank, 1, 10.0, 5.0, 2.0)
    endpoint = Endpoint(rank, engine, None, members[rank], 10.0)
    return Fabric(endpoint, JobScope(Membership(1, members)))


def test_members_agree_on_ids_when_they_form_other_groups_in_between() -> None:
    first, second = fabric(0), fabric(1)
    ids = [first.next_id([0, 1]), first.next_id([0, 2]), first.next_id([0, 1])]
    assert [second.next_id([0, 1]), second.next_id([0, 1])] == [ids[0], ids[2]]


def test_every_group_has_its_own_id() -> None:
    one = fabric(0)
    asked = ([0, 1], [1, 0], [0, 1], [0], [0, 1, 2], [0, 1])
    assert len({one.next_id(ranks) for ranks in asked}) == len(asked)


def test_a_data_parallel_view_has_its_workers_and_all_servers_and_follows_the_job() -> None:
    job = fabric(0)
    workers = [Member(r, "worker", "host", "here", 1, r, "", "", number=r) for r in range(4)]
    server = Member(4, "server", "host", "here", 1, 4, "", "", number=0)
    job.enter_generation(Membership(2, (*workers, server)))
    view = job.data_parallel_view(range(0, 100, 2), "group 0")
    assert view.membership.ranks == (0, 2, 4)
    view.enter_generation(Membership(3, (*workers[:2], server)), forgets=False)
    assert view.membership.ranks == (0, 4)
    assert job.membership.ranks == (0, 1, 4)


def test_a_unit_view_does_not_change_with_the_membership() -> None:
    job = fabric(0)
    members = job.membership.members
    unit = job.unit_view([members[1], members[0]])
    job.watch_announcements(lambda: Membership(5, members[:1]))
    assert unit.newest() is None
    assert (unit.membership.ranks, unit.membership.generation) == ((0, 1), 1)
    assert job.newest() is not None
