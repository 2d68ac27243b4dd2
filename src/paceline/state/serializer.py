"""The one serializer of nested state with tensors in it.

    flatten_state, unflatten_state   plain data for msgpack, and a list of tensors: to a peer
    state_to_json, state_from_json   JSON and named tensors: to files

Only numbers, strings, bytes, lists, tuples, sets, dicts, tensors and numpy's arrays and numbers can
be serialized. Nothing is pickled, so received data cannot run code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import CheckpointError, UsageError

_TUPLE, _TENSOR, _DICT = "tuple", "tensor", "dict"
_SET, _ARRAY, _SCALAR = "set", "array", "scalar"
_BYTES, _FLOAT, _NAMED = "bytes", "float", "named"  # in JSON, which has neither bytes nor infinity


def flatten_state(
    value: Any,
    what: str,
    tensors: list[torch.Tensor] | None = None,
    *,
    goal: str = "sent to a newcomer",
) -> tuple[Any, list[torch.Tensor]]:
    """Return (plain data, tensors); raise UsageError with `what` and `goal` for anything else.

    The tensors are appended to those given.
    """
    tensors = [] if tensors is None else tensors

    def walk(thing: Any) -> Any:
        if isinstance(thing, np.generic | np.ndarray):
            return {_ARRAY if isinstance(thing, np.ndarray) else _SCALAR: add(_tensor_of(thing))}
        if thing is None or isinstance(thing, bool | int | float | str | bytes):
            return thing
        if isinstance(thing, torch.Tensor):
            return {_TENSOR: add(thing.detach())}
        if isinstance(thing, list):
            return [walk(item) for item in thing]
        if isinstance(thing, tuple):
            return {_TUPLE: [walk(item) for item in thing]}
        if isinstance(thing, set | frozenset):
            return {_SET: [walk(item) for item in thing]}
        if isinstance(thing, dict):
            return {_DICT: [[walk(key), walk(item)] for key, item in thing.items()]}
        raise UsageError(
            f"{what} has a {type(thing).__name__} in its state, which cannot be {goal};"
            " only numbers, strings, bytes, lists, tuples, sets, dicts, tensors and arrays can"
        )

    def add(tensor: torch.Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    def _tensor_of(array: Any) -> torch.Tensor:
        try:
            return torch.from_numpy(np.array(array))
        except TypeError as error:
            raise UsageError(f"{what} has an array that cannot be {goal}: {error}") from None

    return walk(value), tensors


def unflatten_state(plain: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Undo `flatten_state`."""
    if isinstance(plain, list):
        return [unflatten_state(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind in (_ARRAY, _SCALAR):
        array = tensors[content].numpy()
        return array if kind == _ARRAY else array[()]
    if kind == _SET:
        return {_key(unflatten_state(item, tensors)) for item in content}
    if kind == _TUPLE:
        return tuple(unflatten_state(item, tensors) for item in content)
    return {_key(unflatten_state(k, tensors)): unflatten_state(v, tensors) for k, v in content}


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def state_to_json(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return JSON for a value; its tensors are added to `tensors`, as `name/0`, `name/1`, ...

    Raise UsageError with the name if something in it cannot be saved.
    """
    plain, inner = flatten_state(value, name, goal="saved")
    tensors.update({f"{name}/{number}": tensor for number, tensor in enumerate(inner)})
    return {_NAMED: [name, len(inner)], "content": _to_json(plain)}


def state_from_json(written: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `state_to_json`; raise CheckpointError if this was not written by it."""
    try:
        name, count = written[_NAMED]
        if count > len(tensors):
            raise ValueError(f"{count} tensors, of {len(tensors)} in the checkpoint")
        inner = [tensors[f"{name}/{number}"] for number in range(count)]
        return unflatten_state(_from_json(written["content"]), inner)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"a checkpoint holds a state that cannot be read: {error!r}"
        ) from None


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
