"""Who updates what: every element has exactly one owner, and the work is even."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data_parallel.update.ownership import cut_anywhere, cut_at_borders, is_elementwise

sizes = st.lists(st.integers(0, 2000), min_size=1, max_size=30)
workers = st.integers(1, 7)


@given(sizes, workers)
def test_every_element_has_one_owner(sizes, num_workers):
    for cut in (cut_anywhere, cut_at_borders):
        ranges = cut(sizes, num_workers)
        for index, size in enumerate(sizes):
            mine = sorted((r.start, r.stop) for r in ranges if r.index == index)
            assert mine[0][0] == 0 and mine[-1][1] == size
            assert all(a[1] == b[0] for a, b in zip(mine, mine[1:], strict=False))
        assert all(0 <= r.owner < num_workers for r in ranges)


@given(sizes, workers)
def test_ranges_are_even_up_to_the_lines_of_each_parameter(sizes, num_workers):
    loads = [0] * num_workers
    for r in cut_anywhere(sizes, num_workers):
        loads[r.owner] += r.stop - r.start
    padding = 16 * (len(sizes) + 1)
    assert max(loads) - min(loads) <= padding


@given(sizes, workers)
def test_cuts_fall_on_cache_lines(sizes, num_workers):
    assert all(r.start % 16 == 0 for r in cut_anywhere(sizes, num_workers))


def test_whole_parameters_go_to_whoever_has_least():
    owners = {r.index: r.owner for r in cut_at_borders([10, 100, 60, 50], 2)}
    assert owners[1] != owners[2] and owners[2] == owners[3]


def test_only_known_optimizers_count_as_elementwise():
    params = [torch.nn.Parameter(torch.zeros(2, 2))]

    class Custom(torch.optim.SGD):
        """May do anything in its step."""

    assert is_elementwise(torch.optim.AdamW(params))
    assert not is_elementwise(Custom(params, lr=0.1))
    assert not is_elementwise(torch.optim.Adafactor(params))
