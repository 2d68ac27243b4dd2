"""The one serializer of state as objects have it: nested, with tensors in it.

    take_apart, put_together   plain data that msgpack has, and a list of tensors: to a peer
    write_down, read_back      JSON and named tensors: to files

Only numbers, texts, bytes, lists, tuples, dicts and tensors can be serialized. Nothing is pickled,
so nothing that arrives can run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.errors import UsageError

_TUPLE, _TENSOR, _DICT = "tuple", "tensor", "dict"
_BYTES, _FLOAT, _NAMED = "bytes", "float", "named"  # in JSON, which has no bytes and no infinity


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


def write_down(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return JSON for a value; its tensors are added to `tensors`, as `name/0`, `name/1`, ...

    UsageError names it if something in it cannot be written down.
    """
    plain, inner = take_apart(value, name, goal="saved")
    tensors.update({f"{name}/{number}": tensor for number, tensor in enumerate(inner)})
    return {_NAMED: [name, len(inner)], "content": _to_json(plain)}


def read_back(written: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `write_down`."""
    name, count = written[_NAMED]
    inner = [tensors[f"{name}/{number}"] for number in range(count)]
    return put_together(_from_json(written["content"]), inner)


def _to_json(plain: Any) -> Any:
    if isinstance(plain, bytes):
        return {_BYTES: plain.hex()}
    if isinstance(plain, float) and not math.isfinite(plain):
        return {_FLOAT: repr(plain)}
    if isinstance(plain, list):
        return [_to_json(item) for item in plain]
    if isinstance(plain, dict):
        return {key: _to_json(item) for key, item in plain.items()}
    return plain


def _from_json(written: Any) -> Any:
    if isinstance(written, list):
        return [_from_json(item) for item in written]
    if not isinstance(written, dict):
        return written
    ((kind, content),) = written.items()
    if kind == _BYTES:
        return bytes.fromhex(content)
    if kind == _FLOAT:
        return float(content)
    return {kind: _from_json(content)}
