"""The check of what a pull returned: it must accept every right answer, and no wrong one."""

from __future__ import annotations

import numpy as np
import pytest
from harness import values
from servers.values import PERIOD, RATE, Applied, holds_one_of

COUNT = 2 * PERIOD + 17  # the last tile is not whole


def push_of(owner: int, seed: int) -> np.ndarray:
    push = np.empty(COUNT, np.float32)
    values.write(push, owner, seed)
    return push


@pytest.fixture
def states() -> tuple[list[np.ndarray], list[Applied]]:
    """Parameters, and what they consist of: one earlier sample, then mine, then everybody's."""
    before = -RATE * (push_of(0, 3) + push_of(1, 3))
    mine = before - RATE * push_of(1, 4)
    everybody = mine - RATE * push_of(0, 4)
    applied = Applied().and_pushes_of(range(2), 3)
    allowed = [applied.and_pushes_of([1], 4), applied.and_pushes_of(range(2), 4)]
    return [before, mine, everybody], allowed


def test_parameters_with_my_push_are_right_with_and_without_the_other_push(states):
    (_, mine, everybody), allowed = states
    mixed = np.where(np.arange(COUNT) % 3 == 0, mine, everybody).astype(np.float32)
    assert all(holds_one_of(params, allowed) for params in (mine, everybody, mixed))


def test_parameters_without_my_push_are_wrong(states):
    (before, mine, _), allowed = states
    assert not holds_one_of(before, allowed)
    for place in (0, PERIOD, COUNT - 1):  # one such element is enough
        params = mine.copy()
        params[place] = before[place]
        assert not holds_one_of(params, allowed)


def test_a_push_that_was_applied_twice_is_noticed(states):
    (_, _, everybody), allowed = states
    assert not holds_one_of(everybody - np.float32(RATE) * push_of(1, 4), allowed)


def test_shifted_parameters_are_noticed(states):
    (_, _, everybody), allowed = states
    assert not holds_one_of(np.roll(everybody, 1), allowed)
