"""Layouts of partitions: placed, lost, copied, moved; every step safe, and all of them end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.membership.partitions import (
    PartitionLayout,
    add_missing_copies,
    initial_layout,
    next_layout,
)

ONE_HOST = {4: "a", 5: "a", 6: "a"}


def settle(layout, replicas, hosts, leaving=()):
    """Take all steps, with every filling copy synced as soon as it is asked for."""
    for _ in range(500):
        after = next_layout(layout, replicas, hosts, leaving)
        check_step(layout, after)
        for partition, ranks in enumerate(after.filling):
            for rank in ranks:
                after = after.synced(partition, rank)
        if after == layout:
            return layout
        layout = after
    raise AssertionError(f"it does not end: {layout}")


def check_step(before: PartitionLayout, after: PartitionLayout):
    """A holder has been add_missing_copies first, and a primary was a holder first."""
    for was, now in zip(before.holders, after.holders, strict=True):
        assert now and set(now) <= set(was)
        assert len(set(now)) == len(now)
        assert len(now) >= len(was) - 1
        if now[0] != was[0]:
            assert set(now) == set(was), "hand over and drop are two steps"


def loads(layout, ranks):
    return [layout.load(rank) for rank in ranks]


def test_primaries_go_round_and_backups_go_elsewhere():
    assert initial_layout(4, 1, ONE_HOST).holders == ((4,), (5,), (6,), (4,))
    two = initial_layout(3, 2, ONE_HOST)
    assert two.holders == ((4, 5), (5, 6), (6, 4))
    assert two.filling == ((), (), ())


def test_backups_prefer_another_host():
    hosts = {4: "a", 5: "a", 6: "b", 7: "b"}
    for holders in initial_layout(8, 2, hosts).holders:
        assert len({hosts[rank] for rank in holders}) == 2


def test_copies_that_share_a_host_are_moved_apart_when_there_is_another_host_again():
    hosts = {4: "a", 5: "a", 6: "b", 7: "b"}
    alone = {4: "a", 5: "a"}
    layout = settle(initial_layout(8, 2, hosts).without({6, 7}), 2, alone)
    assert all(set(ranks) == {4, 5} for ranks in layout.holders)
    again = {**alone, 8: "c"}
    layout = settle(layout, 2, again)
    assert all(len({again[rank] for rank in ranks}) == 2 for ranks in layout.holders)
    assert loads(layout, again) == [4, 4, 8]


def test_a_loss_promotes_the_backup_and_names_what_nobody_has():
    layout = initial_layout(3, 2, ONE_HOST).without({4})
    assert layout.holders == ((5,), (5, 6), (6,))
    assert layout.lost == ()
    assert layout.without({5}).lost == (0,)


def test_a_partition_with_too_few_copies_is_filled_where_there_is_least():
    layout = initial_layout(3, 2, ONE_HOST).without({4})
    hosts = {5: "a", 6: "a"}
    layout = add_missing_copies(layout, 2, hosts)
    assert layout.filling == ((6,), (), (5,))
    assert add_missing_copies(layout, 2, hosts) == layout
    assert layout.synced(0, 6).holders[0] == (5, 6)


def test_a_server_that_came_back_gets_its_share():
    hosts = {5: "a", 6: "a", 9: "a"}
    layout = settle(initial_layout(6, 2, ONE_HOST).without({4}), 2, hosts)
    assert loads(layout, hosts) == [4, 4, 4]
    assert max(layout.primaries(r) for r in hosts) - min(layout.primaries(r) for r in hosts) <= 1


def test_two_servers_with_two_copies_share_the_primaries_again():
    layout = settle(PartitionLayout(((1,), (1,)), ((), ())), 2, {1: "a", 7: "a"})
    assert sorted(ranks[0] for ranks in layout.holders) == [1, 7]
    assert [set(ranks) for ranks in layout.holders] == [{1, 7}, {1, 7}]


def test_nothing_moves_for_balance_while_a_server_is_awaited_that_copies_lack():
    layout = PartitionLayout(((1, 2), (1, 2), (1, 2)), ((), (), ()))
    hosts = {1: "a", 2: "b"}
    assert next_layout(layout, 3, hosts, wanted=3) == layout
    joined = next_layout(layout, 3, {**hosts, 3: "c"}, wanted=3)
    assert joined.holders == layout.holders and joined.filling == ((3,), (3,), (3,))
    assert next_layout(layout, 3, hosts, wanted=2) != layout  # there will be no more copies


def test_a_move_is_fill_then_hand_over_then_drop():
    hosts = {1: "a", 2: "a"}
    layout = PartitionLayout(((1,),), ((),))
    layout = next_layout(layout, 1, hosts, leaving={1})
    assert layout == PartitionLayout(((1,),), ((2,),))
    assert next_layout(layout, 1, hosts, leaving={1}) == layout
    layout = layout.synced(0, 2)
    layout = next_layout(layout, 1, hosts, leaving={1})
    assert layout.holders == ((2, 1),)
    assert next_layout(layout, 1, hosts, leaving={1}).holders == ((2,),)


cases = st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3))


@given(cases)
@settings(max_examples=150, deadline=None)
def test_what_is_spread_needs_no_relief(case):
    servers, partitions, replicas, num_hosts = case
    replicas = min(replicas, servers)
    hosts = {rank: str(rank % num_hosts) for rank in range(servers)}
    layout = initial_layout(partitions, replicas, hosts)
    assert all(len(set(ranks)) == replicas for ranks in layout.holders)
    if num_hosts == 1:
        assert settle(layout, replicas, hosts) == layout
        assert max(loads(layout, hosts)) - min(loads(layout, hosts)) <= 1


@given(cases, st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_comes_and_goes_ends_with_all_copies_and_equal_loads(case, data):
    servers, partitions, replicas, num_hosts = case
    replicas = min(replicas, servers)
    hosts = {rank: str(rank % num_hosts) for rank in range(servers)}
    layout = initial_layout(partitions, replicas, hosts)
    rank = servers
    for _ in range(data.draw(st.integers(1, 5))):
        what = data.draw(st.sampled_from(["lose", "add", "remove"]))
        if what == "lose" and len(hosts) > replicas and replicas > 1:
            gone = data.draw(st.sampled_from(sorted(hosts)))
            del hosts[gone]
            layout = layout.without({gone})
            assert not layout.lost
        elif what == "remove" and len(hosts) > replicas:
            gone = data.draw(st.sampled_from(sorted(hosts)))
            layout = settle(layout, replicas, hosts, {gone})
            assert layout.load(gone) == 0
            del hosts[gone]
        else:
            hosts[rank] = str(rank % num_hosts)
            rank += 1
        layout = settle(layout, replicas, hosts)
        assert all(len(ranks) == replicas for ranks in layout.holders)
        most = min(replicas, len(set(hosts.values())))
        assert all(len({hosts[r] for r in ranks}) == most for ranks in layout.holders)
        if num_hosts == 1:
            assert max(loads(layout, hosts)) - min(loads(layout, hosts)) <= 1
