"""Where parameters lie: every element on one server, cut where allowed, and evenly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.ps.placement import Placement, balance, place

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

KB = 1024
servers = st.integers(1, 9)
# Nothing, less than a line, what is not worth a cut, what is worth some, what is worth many.
size = st.one_of(st.integers(0, 40), st.integers(0, 70_000), st.integers(0, 5_000_000))
items = st.lists(st.tuples(size, st.sampled_from([1, 2, 4, 8, 16])), max_size=12)


def loads_of(parts: list[Placement], itemsizes: list[int], num_servers: int) -> list[int]:
    loads = [0] * num_servers
    for part in parts:
        loads[part.server] += (part.stop - part.start) * itemsizes[part.item]
    return loads


def check_complete(parts: list[Placement], sizes: list[int], num_servers: int) -> None:
    assert parts == sorted(parts, key=lambda part: (part.item, part.start))
    for item, size in enumerate(sizes):
        mine = [part for part in parts if part.item == item]
        assert mine[0].start == 0 and mine[-1].stop == size
        assert all(a.stop == b.start for a, b in pairwise(mine))
        assert all(part.start < part.stop for part in mine) or size == 0 and len(mine) == 1
        used = [part.server for part in mine]
        assert len(set(used)) == len(used), "two parts of an item on one server should be one"
        assert set(used) <= set(range(num_servers))


@patient
@given(items, servers)
def test_every_element_is_on_one_server_and_cuts_fall_on_pages(items, num_servers):
    sizes, itemsizes = [size for size, _ in items], [itemsize for _, itemsize in items]
    parts = place(sizes, num_servers, itemsizes=itemsizes)
    check_complete(parts, sizes, num_servers)
    assert all(part.start * itemsizes[part.item] % 4096 == 0 for part in parts)


@patient
@given(items, servers)
def test_servers_differ_by_no_more_than_what_is_not_worth_a_cut(items, num_servers):
    sizes, itemsizes = [size for size, _ in items], [itemsize for _, itemsize in items]
    parts = place(sizes, num_servers, itemsizes=itemsizes)
    loads = loads_of(parts, itemsizes, num_servers)
    assert max(loads) - min(loads) <= 128 * KB + 4096
    for part in parts:
        is_whole = part.stop - part.start == sizes[part.item]
        assert is_whole or (part.stop - part.start) * itemsizes[part.item] >= 64 * KB - 4096


@patient
@given(items, servers, st.data())
def test_cuts_are_only_made_where_allowed(items, num_servers, data):
    sizes, itemsizes = [size for size, _ in items], [itemsize for _, itemsize in items]
    cuts = [sorted(data.draw(st.sets(st.integers(0, size), max_size=20))) for size in sizes]
    parts = place(sizes, num_servers, itemsizes=itemsizes, cuts=cuts)
    check_complete(parts, sizes, num_servers)
    assert all(part.start == 0 or part.start in cuts[part.item] for part in parts)


@patient
@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=40), servers)
def test_cuts_of_one_item_are_as_near_to_equal_as_its_pieces_allow(pieces, num_servers):
    borders = [sum(pieces[:count]) for count in range(len(pieces) + 1)]
    total = borders[-1]
    parts = place([total], num_servers, itemsizes=[4], cuts=[borders])
    wanted = max(min(num_servers, total * 4 // (64 * KB)), 1)
    assert max(p.stop - p.start for p in parts) <= total / wanted + max(pieces)


def test_a_model_is_spread_within_a_tenth_of_the_mean():
    buckets = [262_144, *[4_194_304] * 5, 3_000_003, 1_000]
    for num_servers in (1, 2, 3, 4, 7):
        parts = place(buckets, num_servers, itemsizes=[4] * len(buckets))
        loads = loads_of(parts, [4] * len(buckets), num_servers)
        assert max(loads) <= 1.1 * sum(loads) / num_servers
        assert all(sum(part.item == item for part in parts) == num_servers for item in range(1, 6))


def test_equal_parts_are_in_the_order_of_the_servers():
    parts = place([1_000_000], 4, itemsizes=[4])
    borders = [0, 250_880, 500_736, 750_592, 1_000_000]  # whole pages, of 1024 elements
    assert parts == [Placement(0, borders[k], borders[k + 1], k) for k in range(4)]


def test_small_items_stay_whole_and_go_where_least_is():
    parts = place([10, 100, 60, 50], 2, itemsizes=[4] * 4)
    assert [part.server for part in parts] == [0, 0, 1, 1]
    assert all(part.start == 0 for part in parts)


def test_the_balance_is_told():
    sizes, itemsizes = [25_050_000, 25], [4, 4]
    told = balance(place(sizes, 2, itemsizes=itemsizes), itemsizes, 2)
    assert told == (
        "server 0: 50.1 MB in 1 shard, server 1: 50.1 MB in 2 shards (largest 1.00 x the mean)"
    )


def test_servers_without_anything_are_named():
    told = balance(place([100, 10], 4, itemsizes=[4, 2]), [4, 2], 4)
    assert told == (
        "server 0: 400 B in 1 shard, server 1: 20 B in 1 shard, nothing on servers 2, 3 "
        "(largest 3.81 x the mean)"
    )
    assert balance([], [], 1) == "nothing on server 0"


def test_no_servers_is_an_error():
    with pytest.raises(UsageError, match="cannot be placed on 0 servers; start at least 1"):
        place([1], 0, itemsizes=[4])
