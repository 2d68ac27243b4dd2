"""State as objects have it (nested, with tensors in it), as JSON and named tensors: for files.

As plain.py, but for JSON, which has neither bytes nor numbers that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from paceline.state.plain import put_together, take_apart

_BYTES, _FLOAT, _NAMED = "bytes", "float", "named"


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
