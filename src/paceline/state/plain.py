"""State as objects have it (nested, with tensors in it) taken apart into plain data and tensors.

Only what can be written down travels: numbers, texts, lists, tuples, dicts and tensors. Nothing is
pickled, so nothing that arrives can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import UsageError

_TUPLE, _TENSOR, _DICT = "tuple", "tensor", "dict"


def take_apart(
    value: Any,
    what: str,
    tensors: list[torch.Tensor] | None = None,
    *,
    goal: str = "sent to a newcomer",
) -> tuple[Any, list[torch.Tensor]]:
    """Return (plain, tensors); UsageError names `what`, and the goal, if something is neither.

    The tensors are added to those given.
    """
    tensors = [] if tensors is None else tensors

    def walk(thing: Any) -> Any:
        if thing is None or isinstance(thing, bool | int | float | str | bytes):
            return thing
        if isinstance(thing, torch.Tensor):
            tensors.append(thing.detach())
            return {_TENSOR: len(tensors) - 1}
        if isinstance(thing, list):
            return [walk(item) for item in thing]
        if isinstance(thing, tuple):
            return {_TUPLE: [walk(item) for item in thing]}
        if isinstance(thing, dict):
            return {_DICT: [[walk(key), walk(item)] for key, item in thing.items()]}
        raise UsageError(
            f"{what} has a {type(thing).__name__} in its state, which cannot be {goal};"
            " only numbers, texts, lists, tuples, dicts and tensors can"
        )

    return walk(value), tensors


def put_together(plain: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Undo `take_apart`."""
    if isinstance(plain, list):
        return [put_together(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == _TUPLE:
        return tuple(put_together(item, tensors) for item in content)
    return {_key(put_together(k, tensors)): put_together(v, tensors) for k, v in content}


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
