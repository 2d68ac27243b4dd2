"""The order of samples: a permutation of the seed, and samplers' indices as plain data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.randomness import mix_seeds
from paceline.data.split.order import LocalOrder, to_plain_index
from paceline.errors import UsageError
from paceline.state.serializer import unflatten_state


@given(st.integers(0, 300), st.integers(1, 50), st.none() | st.integers(-(2**63), 2**64 - 1))
def test_every_index_comes_once(samples: int, count: int, seed: int | None) -> None:
    order = LocalOrder(samples, None if seed is None else mix_seeds(seed))
    taken: list[int] = []
    while len(units := order.units(len(taken), len(taken) + count)):
        assert len(units) <= count
        taken.extend(map(int, units))
    assert sorted(taken) == list(range(samples))
    if seed is None:
        assert taken == sorted(taken)


def test_orders_follow_from_seed_and_epoch() -> None:
    def order(*numbers: int) -> list[int]:
        return list(LocalOrder(1000, mix_seeds(*numbers)).units(0, 1000))

    assert order(3, 4) == order(3, 4)
    different = [order(3, 4), order(4, 3), order(3, 5), order(-3, 4), order(7), order(0, 7)]
    assert len({tuple(indices) for indices in different}) == len(different)


indices = st.recursive(
    st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.tuples(inner, inner),
    max_leaves=6,
)


@given(indices)
def test_indices_survive_encoding(index: object) -> None:
    assert unflatten_state(to_plain_index(index), ()) == index


def test_indices_of_torch_and_numpy_become_numbers() -> None:
    made = to_plain_index([torch.tensor(3), np.int32(4), 5])
    assert made == [3, 4, 5] and {type(index) for index in made} == {int}
    assert to_plain_index(torch.tensor([1, 2])) == [1, 2]
    for wrong in (1.5, object(), None):
        with pytest.raises(UsageError, match="index of type"):
            to_plain_index(wrong)
    with pytest.raises(UsageError, match="empty batch"):
        to_plain_index([])
