"""Random numbers: seeds by place, and the state of this process's generators.

SEEDS. Before each batch is made the generators of torch, `random` and numpy are seeded from (seed,
number of the worker, epoch, place in the pass): in the processes of a DataLoader always, so that a
run that is resumed in the middle of an epoch augments its samples as the first would have; in the
process of the script only for on_loss="replace", and there once more before the batch is given to
the script. So whatever the dataset and the model draw for a batch follows from its place alone, and
not from how many batches this process has seen before.

STATES. A sampler, a stream or a loader of a worker's own may draw random numbers when a pass
begins. A run that is resumed reads the same data again and must draw the same. So the state of the
generators at the beginning of such a pass is remembered as plain data, and put back for as long as
what has been used is read once more; then the process has its own numbers again.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

State = dict[str, Any]  # plain data

_MAKING, _USING, _STEP = 1, 2, 3


# -- seeds ----------------------------------------------------------------------------------------


def mixed(*numbers: int) -> int:
    """Return a seed made of several numbers, such that neighbours have nothing in common."""
    words = np.random.SeedSequence([number % 2**64 for number in numbers])
    return int(words.generate_state(1, np.uint64)[0])


def seed_everything(seed: int) -> None:
    """Seed this process's generators."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the one that datasets use


class Seeds:
    """The seeds of one worker's pass."""

    def __init__(self, seed: int, number: int, epoch: int) -> None:
        self._numbers = (seed, number, epoch)

    def of_making(self, batch: int) -> int:
        """For the dataset, in whichever process."""
        return mixed(*self._numbers, batch, _MAKING)

    def before_use(self, batch: int) -> None:
        """For what the script computes with the batch."""
        seed_everything(mixed(*self._numbers, batch, _USING))


def seed_step(seed: int, number: int, step: int) -> None:
    """Seed before a step, for what is drawn without a batch."""
    seed_everything(mixed(seed, number, step, _STEP))


# -- states ---------------------------------------------------------------------------------------


def remembered(things: Iterable[Any]) -> State:
    """Return the state of the generators of this process, and of those that these things have."""
    return {**_of_process(), "own": [_text(g.get_state()) for g in _generators(things)]}


@contextmanager
def as_then(state: State | None, things: Iterable[Any]) -> Iterator[None]:
    """Let the generators be as they were; afterwards those of the process are as they are now."""
    if state is None:
        yield
        return
    for generator, saved in zip(_generators(things), state["own"], strict=False):
        generator.set_state(_bytes(saved))
    with kept_random_state():
        _put_back(state)
        yield


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave the generators of this process as they were."""
    state = get_random_state()
    try:
        yield
    finally:
        set_random_state(state)


def get_random_state() -> tuple[Any, Any, Any]:
    """Return where torch's, Python's and numpy's generators are."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)


def set_random_state(state: tuple[Any, Any, Any]) -> None:
    """Put them there."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def _of_process() -> State:
    state, (version, words, next_gauss), (name, keys, *rest) = get_random_state()
    return {
        "torch": _text(state),
        "random": [version, _encoded(np.array(words, np.uint32)), next_gauss],
        "numpy": [name, _encoded(np.asarray(keys)), *rest],
    }


def _put_back(state: State) -> None:
    version, words, next_gauss = state["random"]
    name, keys, *rest = state["numpy"]
    python = (version, tuple(_words(words).tolist()), next_gauss)
    set_random_state((_bytes(state["torch"]), python, (name, _words(keys), *rest)))


def _generators(things: Iterable[Any]) -> list[torch.Generator]:
    found = {id(g): g for thing in things if (g := getattr(thing, "generator", None)) is not None}
    return [g for g in found.values() if isinstance(g, torch.Generator)]


def _text(state: torch.Tensor) -> str:
    return _encoded(state.numpy())


def _encoded(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _words(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint32)
