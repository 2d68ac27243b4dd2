"""The random generators of a process, taken aside and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

State = tuple[Any, Any, Any]


def get_random_state() -> State:
    """Return where torch's, Python's and numpy's generators are."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_state(state: State) -> None:
    """Put them there."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave the generators of this process as they were."""
    state = get_random_state()
    try:
        yield
    finally:
        set_random_state(state)
