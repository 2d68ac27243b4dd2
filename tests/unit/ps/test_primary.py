"""Who answers for a partition, and what a worker does about it."""

from __future__ import annotations

from paceline.control.member import Member, Membership
from paceline.ps.client.failover import (
    Connect,
    GiveUp,
    Primary,
    Stay,
    Wait,
    choose_action,
    primary_of,
)

WORKER = 0


def member(rank: int, role: str, number: int) -> Member:
    return Member(rank, role, "host", "localhost", 100 + rank, number, f"unix{rank}", "", number)


def members(*servers: int) -> list[Member]:
    workers = [member(rank, "worker", rank) for rank in (0, 1)]
    return workers + [member(rank, "server", rank - 2) for rank in servers]


def first() -> Membership:
    """Two partitions on two servers, each the other's backup."""
    return Membership(1, tuple(members(2, 3)), ((2, 3), (3, 2)))


def test_the_first_holder_answers_since_the_first_generation() -> None:
    assert primary_of(first(), 0) == Primary(2, 1)
    assert choose_action(first(), 0, WORKER, None, None) == Connect(Primary(2, 1))
    assert choose_action(first(), 0, WORKER, Primary(2, 1), None) == Stay()


def test_a_broken_line_waits_for_the_next_membership() -> None:
    assert choose_action(first(), 0, WORKER, None, Primary(2, 1)) == Wait()
    later = first().without([2])
    assert later.holders == ((3,), (3,))
    assert choose_action(later, 0, WORKER, None, Primary(2, 1)) == Connect(Primary(3, 2))
    # The partition whose backup was lost goes on as it is.
    assert choose_action(later, 1, WORKER, Primary(3, 1), None) == Stay()


def test_the_membership_may_know_before_the_line_breaks() -> None:
    assert choose_action(first().without([2]), 0, WORKER, Primary(2, 1), None) == Connect(
        Primary(3, 2)
    )


def test_other_changes_keep_the_line() -> None:
    membership = first().without([1])  # a worker
    assert choose_action(membership, 0, WORKER, Primary(2, 1), None) == Stay()
    with_backup = membership.next(members(2, 3, 4), ((2, 3, 4), (3, 2)))
    assert choose_action(with_backup, 0, WORKER, Primary(2, 1), None) == Stay()


def test_a_server_that_becomes_primary_again_has_another_post() -> None:
    away = first().next(members(2, 3), ((3, 2), (3, 2)))
    back = away.next(members(2, 3), ((2, 3), (3, 2)))
    assert [primary_of(m, 0) for m in (first(), away, back)] == [
        Primary(2, 1),
        Primary(3, 2),
        Primary(2, 3),
    ]
    assert choose_action(back, 0, WORKER, None, Primary(2, 1)) == Connect(Primary(2, 3))


def test_a_partition_without_holders_is_given_up() -> None:
    gone = first().without([2]).without([3])
    assert gone.holders == ((), ())
    assert choose_action(gone, 0, WORKER, None, Primary(3, 2)) == GiveUp()


def test_a_newcomer_waits_until_it_is_let_in() -> None:
    assert choose_action(first(), 0, 7, None, None) == Wait()
    inside = first().next([*members(2, 3), member(7, "worker", 2)], first().partitions)
    assert choose_action(inside, 0, 7, None, None) == Connect(Primary(2, 1))
