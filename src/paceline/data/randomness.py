"""Random numbers: seeds by batch, and the states of this process's generators.

SEEDS. The generators of torch, `random` and numpy are seeded from (seed, number of the worker,
epoch, batch) before each batch is made. Processes of a DataLoader always do so: a run that is
resumed in the middle of an epoch then augments its samples as the first run would have. The process
of the script does so only for on_loss="replace", and there once more before the script receives the
batch. So the numbers that the dataset and the model draw for a batch follow from its position, and
not from how many batches this process has seen.

STATES. A sampler, a stream or a worker's own loader may draw random numbers when a pass begins. A
resumed run reads the same data again and must draw the same numbers. So the generator states at the
beginning of such a pass are saved as plain data, and restored while used data is read again. Then
the process continues with its own states.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paceline.comm.devices import seed_all

State = dict[str, Any]  # plain data

_MAKING, _USING, _STEP = 1, 2, 3


# -- seeds ----------------------------------------------------------------------------------------


def mix_seeds(*numbers: int) -> int:
    """Return a seed mixed from several numbers, so that neighbouring seeds are unrelated."""
    sequence = np.random.SeedSequence([number % 2**64 for number in numbers])
    return int(sequence.generate_state(1, np.uint64)[0])


def seed_everything(seed: int) -> None:
    """Seed this process's generators."""
    torch.default_generator.manual_seed(seed)
    seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the one that datasets use


class Seeds:
    """The seeds of one worker's pass."""

    def __init__(self, seed: int, number: int, epoch: int) -> None:
        self._numbers = (seed, number, epoch)

    def of_making(self, batch: int) -> int:
        """Return the seed for the dataset, in any process."""
        return mix_seeds(*self._numbers, batch, _MAKING)

    def before_use(self, batch: int) -> None:
        """Seed this process for what the script computes with a batch."""
        seed_everything(mix_seeds(*self._numbers, batch, _USING))


def seed_step(seed: int, number: int, step: int) -> None:
    """Seed this process before a step, for numbers that are drawn without a batch."""
    seed_everything(mix_seeds(seed, number, step, _STEP))


# -- states ---------------------------------------------------------------------------------------


def save_random_state(owners: Iterable[Any]) -> State:
    """Return the states of the generators of this process, and of the given objects."""
    return {**_process_state(), "own": [_text(g.get_state()) for g in _generators(owners)]}


@contextmanager
def with_random_state(state: State | None, owners: Iterable[Any]) -> Iterator[None]:
    """Restore the generators within the block; afterwards those of this process are as before."""
    if state is None:
        yield
        return
    for generator, saved in zip(_generators(owners), state["own"], strict=False):
        generator.set_state(_bytes(saved))
    with preserve_random_state():
        _set_process_state(state)
        yield


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the generators of this process after the block."""
    state = get_random_state()
    try:
        yield
    finally:
        set_random_state(state)


def get_random_state() -> tuple[Any, Any, Any]:
    """Return the states of the generators of torch, Python and numpy."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)


def set_random_state(state: tuple[Any, Any, Any]) -> None:
    """Set the states of the generators of torch, Python and numpy."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def _process_state() -> State:
    state, (version, internal, next_gauss), (name, keys, *rest) = get_random_state()
    return {
        "torch": _text(state),
        "random": [version, _encoded(np.array(internal, np.uint32)), next_gauss],
        "numpy": [name, _encoded(np.asarray(keys)), *rest],
    }


def _set_process_state(state: State) -> None:
    version, internal, next_gauss = state["random"]
    name, keys, *rest = state["numpy"]
    python = (version, tuple(_uint32(internal).tolist()), next_gauss)
    set_random_state((_bytes(state["torch"]), python, (name, _uint32(keys), *rest)))


def _generators(owners: Iterable[Any]) -> list[torch.Generator]:
    found = {id(g): g for owner in owners if (g := getattr(owner, "generator", None)) is not None}
    return [g for g in found.values() if isinstance(g, torch.Generator)]


def _text(state: torch.Tensor) -> str:
    return _encoded(state.numpy())


def _encoded(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _uint32(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint32)
