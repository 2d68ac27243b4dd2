"""Small values that ranks tell each other."""

from __future__ import annotations

import pytest

import paceline as pl
from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object, broadcast_object, first_difference
from support import run_ranks

VALUES = [None, "x" * 100_000, {"größe": [1, 2.5, True], "名前": "日本 🚲"}, [], "", -(2**63)]


# -- in the ranks ---------------------------------------------------------------------------------


def told(group: Group) -> None:
    for shift in range(len(VALUES)):
        expected = [VALUES[(rank + shift) % len(VALUES)] for rank in range(group.size)]
        assert all_gather_object(group, expected[group.rank]) == expected
        for root in range(group.size):
            assert broadcast_object(group, expected[group.rank], root) == expected[root]


def differences(group: Group) -> list[str | None]:
    """Each case has the lines of rank 0, 1, 2."""
    cases = [
        (["a", "b"], ["a", "b"], ["a", "b"]),
        ([], [], []),
        (["a", "b"], ["a", "b"], ["a", "c"]),
        (["a", "b", "c"], ["a", "b", "x"], ["a", "y", "c"]),  # the earliest line counts
        (["a", "b"], ["a", "b"], ["a"]),  # one is missing
        (["a"], ["a", "b"], ["a"]),  # one too many
        ([], [], ["only here"]),
        (["here"], ["here"], []),
        (["ä" * 1000], ["ä" * 1000], ["ä" * 999 + "é"]),
        (["a", "b"], ["c", "b"], ["d", "b"]),  # the lowest rank counts
    ]
    return [first_difference(group, case[group.rank]) for case in cases]


def in_a_part_of_the_job(group: Group) -> str | None:
    if group.rank == 0:
        return None
    part = pl.new_group([2, 1])
    return first_difference(part, [f"rank {group.rank}"])


# -- in the test session --------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "hosts"), [(1, 1), (3, 1), (3, 3)])
def test_values_of_any_size_arrive_in_rank_order(world_size, hosts):
    run_ranks(world_size, told, hosts=hosts)


def test_the_first_difference_is_the_same_answer_everywhere():
    answers = run_ranks(3, differences)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] == [
        None,
        None,
        "rank 2 has c, rank 0 has b",
        "rank 2 has y, rank 0 has b",
        "rank 2 has nothing, rank 0 has b",
        "rank 1 has b, rank 0 has nothing",
        "rank 2 has only here, rank 0 has nothing",
        "rank 2 has nothing, rank 0 has here",
        f"rank 2 has {'ä' * 999}é, rank 0 has {'ä' * 1000}",
        "rank 1 has c, rank 0 has a",
    ]


def test_differences_name_the_ranks_of_the_job():
    answers = run_ranks(3, in_a_part_of_the_job)
    assert answers[1:] == ["rank 1 has rank 1, rank 2 has rank 2"] * 2
