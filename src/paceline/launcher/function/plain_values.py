"""Plain values: what a launched function may return, and how they reach the caller.

Results are sent between processes as msgpack: None, booleans, numbers, strings, bytes, and lists
and dictionaries of them, and nothing else. So neither code comes back, nor an object that only
looks like the returned one. A tuple arrives as a list.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.errors import ProtocolError, UsageError

_WHAT = "None, bool, int, float, str, bytes, or lists, tuples and dicts of these"
_MAX_DEPTH = 100


def pack(value: object) -> bytes:
    """Return a result as bytes; raises UsageError with the first part that is not plain."""
    return msgspec.msgpack.encode(_plain(value, "the result", 0))


def unpack(data: bytes) -> object:
    """Return a value from its bytes; raise ProtocolError if they are none."""
    try:
        return msgspec.msgpack.decode(data)
    except (ValueError, TypeError, RecursionError) as error:  # ValueError: msgspec's and Unicode's
        raise ProtocolError(f"a result of {len(data)} bytes cannot be decoded: {error}") from None


def _plain(value: object, name: str, depth: int) -> object:
    """Return a copy in exactly the types of msgpack; raises UsageError."""
    if depth > _MAX_DEPTH:
        raise UsageError(f"{name[:80]} ...: nested deeper than {_MAX_DEPTH}, or within itself")
    if value is None or isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, int):
        return _small(int(value), name)
    if isinstance(value, float):  # also numpy's float64, which is one
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(k, name): _plain(v, f"{name}[{k!r:.40}]", depth + 1) for k, v in value.items()}
    raise UsageError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}; a launched function can"
        f" return {_WHAT}{_hint(value)}"
    )


def _small(value: int, name: str) -> int:
    if not -(1 << 63) <= value < 1 << 64:
        raise UsageError(f"{name} is an integer of more than 64 bits; return it as a str")
    return value


def _key(key: object, name: str) -> Any:
    if isinstance(key, str | bytes) and not isinstance(key, bool):
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        return _small(int(key), name)
    raise UsageError(
        f"{name} has the key {key!r:.40} ({type(key).__name__}); the keys of a dict that is"
        " returned are str, bytes or int"
    )


def _hint(value: object) -> str:
    """Return how arrays become plain."""
    return ": use .tolist() or .item()" if hasattr(value, "tolist") else ""
