"""The state of this process's generators of random numbers, kept so that data can be read again.

A sampler, a stream or a loader of a worker's own may draw random numbers when a pass begins: with
torch, `random` or numpy, or with a `generator` of its own. Who reads the same data again in another
process (a run that is resumed) must draw the same. So their state at the beginning of such a pass
is remembered as plain data, and put back for as long as what has been used is read once more; then
the process has its own numbers again.
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


def remembered(things: Iterable[Any]) -> State:
    """Return the state of the generators of this process, and of those that these things have."""
    return {**_of_process(), "own": [_text(g.get_state()) for g in _generators(things)]}


@contextmanager
def as_then(state: State | None, things: Iterable[Any]) -> Iterator[None]:
    """Let the generators be as they were; afterwards those of the process are as they are now."""
    if state is None:
        yield
        return
    now = _of_process()
    own = _generators(things)
    for generator, saved in zip(own, state["own"], strict=False):
        generator.set_state(_bytes(saved))
    _put_back(state)
    try:
        yield
    finally:
        _put_back(now)


def _of_process() -> State:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    return {
        "torch": _text(torch.get_rng_state()),
        "random": [version, _encoded(np.array(words, np.uint32)), next_gauss],
        "numpy": [name, _encoded(np.asarray(keys)), position, has_gauss, gauss],
    }


def _put_back(state: State) -> None:
    torch.set_rng_state(_bytes(state["torch"]))
    version, words, next_gauss = state["random"]
    random.setstate((version, tuple(_words(words).tolist()), next_gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, _words(keys), *rest))


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
