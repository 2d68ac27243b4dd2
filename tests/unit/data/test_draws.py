"""Generators as they were: what is read again draws the same, and the process goes on as it was."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from paceline.data.randomness import as_then, remembered


class Sampler:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)


def draw(sampler: Sampler) -> list[float]:
    own = torch.rand(1, generator=sampler.generator)
    numpy = [float(np.random.rand()), float(np.random.normal())]
    return [float(torch.rand(1)), random.random(), random.gauss(0, 1), *numpy, float(own)]


def test_the_same_is_drawn_again_and_nothing_else_is_disturbed() -> None:
    sampler, other = Sampler(), Sampler()
    draw(sampler)
    state = json.loads(json.dumps(remembered([sampler, None, 7])))
    first = draw(sampler)
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    with as_then(state, [other, None]):
        assert draw(other) == first
    here = draw(other)[:-1]
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    assert draw(other)[:-1] == here


def test_without_a_state_nothing_happens() -> None:
    torch.manual_seed(1)
    with as_then(None, []):
        first = float(torch.rand(1))
    torch.manual_seed(1)
    assert float(torch.rand(1)) == first
