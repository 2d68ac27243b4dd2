"""Memberships are values: they answer questions and make successors, and never change."""

from __future__ import annotations

import msgspec
import pytest

from paceline.control.member import Membership
from paceline.control.membership.lifecycle import FirstGeneration
from paceline.errors import RendezvousError


def test_a_successor_has_the_next_generation_and_keeps_ranks(make_member):
    first = Membership(1, tuple(make_member(rank) for rank in range(4)))
    second = first.without([1, 3])
    assert (second.generation, second.ranks, second.world_size) == (2, (0, 2), 2)
    assert first.ranks == (0, 1, 2, 3)
    assert second.member(2) is first.member(2)


def test_an_absent_rank_is_named(make_member):
    membership = Membership(3, (make_member(0), make_member(2)))
    with pytest.raises(KeyError, match=r"rank 1 is not in generation 3 \[0, 2\]"):
        membership.member(1)


def test_a_membership_survives_the_wire(make_member):
    membership = Membership(7, (make_member(0, tcp="h:1"), make_member(1, unix="name")))
    encoded = msgspec.msgpack.encode(membership)
    assert msgspec.msgpack.decode(encoded, type=Membership) == membership


def test_ranks_may_arrive_in_any_order(make_member):
    first = FirstGeneration(3)
    assert first.add(make_member(2)) is None
    assert first.add(make_member(0)) is None
    assert first.missing == (1,)
    membership = first.add(make_member(1))
    assert membership is not None
    assert (membership.generation, membership.ranks) == (1, (0, 1, 2))


def test_a_rank_that_went_away_may_come_again_only_before_the_start(make_member):
    first = FirstGeneration(2)
    first.add(make_member(0))
    first.remove(0)
    assert first.missing == (0, 1)
    first.add(make_member(0))
    first.add(make_member(1))
    first.remove(0)
    assert first.missing == ()
    with pytest.raises(RendezvousError, match="rank 0 claimed twice"):
        first.add(make_member(0))


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_out_of_range_are_refused(make_member, rank):
    with pytest.raises(RendezvousError, match=rf"rank {rank} \(here:\d+\) is not in 0..1"):
        FirstGeneration(2).add(make_member(rank))


def test_a_world_of_nobody_is_refused():
    with pytest.raises(RendezvousError, match="world size 0"):
        FirstGeneration(0)
