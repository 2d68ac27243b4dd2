"""Where to cut: exact against all partitions; the measured split of an unbalanced model."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from paceline.errors import UsageError
from paceline.model_parallel.pipeline.measuring import LayerCost
from paceline.model_parallel.pipeline.partitioning import balance, choose_split_points, partition
from paceline.model_parallel.pipeline.tracing import trace


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rate(costs, crossing, cuts):
    """What a partition is judged by: slowest stage, bytes sent, unevenness."""
    bounds = [0, *cuts, len(costs)]
    times = [sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    return max(times), sum(crossing[cut] for cut in cuts), sum(one * one for one in times)


@settings(deadline=None)
@given(st.data())
def test_the_best_of_all_partitions_is_found(data):
    # Whole numbers, so that equal sums are equal and ties occur.
    costs = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    num_stages = data.draw(st.integers(1, len(costs)))
    crossing = data.draw(
        st.lists(st.integers(0, 3), min_size=len(costs), max_size=len(costs)), label="crossing"
    )
    cuts = partition(costs, num_stages, crossing)
    every = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert rate(costs, crossing, cuts) == min(rate(costs, crossing, one) for one in every)


def of_processes(costs, cuts, stage_ranks):
    bounds = [0, *cuts, len(costs)]
    loads = dict.fromkeys(stage_ranks, 0)
    for owner, (a, b) in zip(stage_ranks, itertools.pairwise(bounds), strict=True):
        loads[owner] += sum(costs[a:b])
    return max(loads.values())


@pytest.mark.parametrize("stage_ranks", [[0, 1, 1, 0], [0, 1, 0, 1]])
def test_processes_with_several_stages_are_balanced(stage_ranks):
    # Six blocks: two stages of 2 and two of 1 are all equally good, unless one process gets 2 + 2.
    costs = [1] * 6
    for cuts in ([1, 3, 5], [2, 4, 5], [2, 3, 4]):
        assert of_processes(costs, balance(costs, cuts, stage_ranks), stage_ranks) == 3


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=12), st.sampled_from(["V", "rounds"]))
def test_balancing_never_makes_it_worse_and_comes_near_the_best(costs, kind):
    stage_ranks = [0, 1, 1, 0] if kind == "V" else [0, 1, 0, 1]
    begin = partition(costs, 4)
    found = of_processes(costs, balance(costs, begin, stage_ranks), stage_ranks)
    every = itertools.combinations(range(1, len(costs)), 3)
    best = min(of_processes(costs, one, stage_ranks) for one in every)
    assert best <= found <= min(of_processes(costs, begin, stage_ranks), best + max(costs))


def test_no_partition_without_layers():
    with pytest.raises(UsageError, match="2 layers cannot be split into 3 stages"):
        partition([1.0, 2.0], 3)
    with pytest.raises(UsageError, match="at least one"):
        partition([1.0], 0)


def cost(name, seconds, sent=0, calls=1):
    return LayerCost(name, seconds, 0.0, 0, 0, sent, calls)


def test_starts_follow_costs_and_bytes():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    graph = trace(model, (torch.zeros(1, 2),))
    heavy_first = [cost("0", 10), cost("1", 1), cost("2", 1), cost("3", 1)]
    assert choose_split_points(graph, heavy_first, 2) == ["1"]
    # The first cut sends less than the second; both leave 2 + 2 at most.
    even = [cost("0", 2, sent=1), cost("1", 0, sent=9), cost("2", 2), cost("3", 0)]
    assert choose_split_points(graph, even, 2) == ["1"]
    with pytest.raises(
        UsageError, match=r"5 stages need 5 layers, and the model has 4: 0, 1, 2, 3"
    ):
        choose_split_points(graph, even, 5)


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.last = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        return self.same(self.last(self.same(self.first(x))))


def test_no_stage_starts_at_a_layer_that_is_called_twice():
    graph = trace(Again(), (torch.zeros(1, 2),))
    costs = [cost("first", 1), cost("same", 20, calls=2), cost("last", 1)]
    assert choose_split_points(graph, costs, 2) == ["last"]
    with pytest.raises(UsageError, match="no stage can start there: same"):
        choose_split_points(graph, costs, 3)


def test_an_unbalanced_model_is_cut_within_a_tenth_of_the_optimum():
    torch.manual_seed(0)
    wide, narrow = 256, 80  # ten times as many multiplications
    model = nn.Sequential(
        *(nn.Linear(wide, wide) for _ in range(3)),
        nn.Linear(wide, narrow),
        *(nn.Linear(narrow, narrow) for _ in range(8)),
    )
    example = torch.randn(64, wide)
    costs = pl.measure_layers(model, example)
    graph = trace(model, (example,))
    seconds = [one.forward_s + one.backward_s for one in costs]
    for num_stages in (2, 3, 4):
        starts = choose_split_points(graph, costs, num_stages)
        cuts = [graph.layers.index(name) for name in starts]
        every = itertools.combinations(range(1, len(seconds)), num_stages - 1)
        best = min(rate(seconds, [0] * len(seconds), one)[0] for one in every)
        assert rate(seconds, [0] * len(seconds), cuts)[0] <= 1.1 * best
