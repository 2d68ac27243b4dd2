"""Random numbers for pieces: other ones on every process, and yet reproducible.

All processes of the tp axis have equal global generators, so whole tensors get the same dropout
mask everywhere. For an operation on pieces each process draws one number from it (the same
everywhere: the generators stay equal), seeds with it and its own index, and puts the state back.
It happens within one operation, so a recomputed region (activation checkpointing), which starts
from the kept state, draws the same masks again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def own_randomness(index: int) -> Iterator[None]:
    """Let random numbers differ between the processes of the axis while in the block."""
    generator = torch.default_generator
    number = int(torch.randint(2**62, ()))
    state = generator.get_state()
    generator.manual_seed(number + index)
    try:
        yield
    finally:
        generator.set_state(state)
