"""Changes messages as trees: decode, change some nodes, encode.

A changed byte in the middle of msgpack or JSON mostly makes all of it unreadable, and a fuzzer that
only changes bytes hardly ever comes past the parser. Here fields are replaced by extreme values, by
values of another type, or by other parts of the same message; lists and dicts lose, repeat and
exchange entries.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

_NUMBERS = (0, 1, -1, 2, 7, 127, 255, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 48, 1 << 62)
_EXTREMES = ((1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 1e308, -0.5, float("nan"), float("inf"))
_TEXTS = (
    "",
    "x",
    "\0",
    "../../x",
    "a" * 300,
    "é\U0001f600",
    "worker",
    "server",
    "operator",
    "__class__",
)
_OTHERS = (None, True, False, b"", b"\xff\xfe", [], {}, [[]], {"type": "x"}, {"": None})

_DECODE: dict[str, Callable[[bytes], Any]] = {
    "msgpack": msgspec.msgpack.decode,
    "json": msgspec.json.decode,
}
_ENCODE: dict[str, Callable[[Any], bytes]] = {
    "msgpack": msgspec.msgpack.encode,
    "json": msgspec.json.encode,
}


def mutate(data: bytes, form: str, seed: int) -> bytes | None:
    """Return a changed message; None if this input is not one."""
    dice = random.Random(seed)
    try:
        tree = _DECODE[form](data)
        parts = list(_parts(tree))
        for _ in range(dice.choice((1, 1, 1, 2, 3, 5))):
            tree = _changed(tree, dice, parts)
        return _ENCODE[form](tree)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _parts(tree: Any) -> Any:
    yield tree
    if isinstance(tree, dict):
        for item in tree.values():
            yield from _parts(item)
    elif isinstance(tree, list):
        for item in tree:
            yield from _parts(item)


def _changed(tree: Any, dice: random.Random, parts: list[Any]) -> Any:
    """Return the tree with one change, in it or below."""
    if isinstance(tree, dict) and tree and dice.random() < 0.9:
        key = dice.choice(list(tree))
        if dice.random() < 0.15:
            return _other_entries(tree, key, dice, parts)
        return {**tree, key: _changed(tree[key], dice, parts)}
    if isinstance(tree, list) and tree and dice.random() < 0.9:
        at = dice.randrange(len(tree))
        if dice.random() < 0.2:
            return _other_items(tree, at, dice, parts)
        return [*tree[:at], _changed(tree[at], dice, parts), *tree[at + 1 :]]
    return _replacement(tree, dice, parts)


def _other_entries(tree: dict[Any, Any], key: Any, dice: random.Random, parts: list[Any]) -> Any:
    rest = {k: v for k, v in tree.items() if k != key}
    return dice.choice(
        (rest, {**rest, "other": tree[key]}, {**tree, dice.choice(_TEXTS): dice.choice(parts)})
    )


def _other_items(tree: list[Any], at: int, dice: random.Random, parts: list[Any]) -> Any:
    before, after = tree[:at], tree[at + 1 :]
    return dice.choice(
        (
            before + after,
            [*before, tree[at], tree[at], *after],
            [*before, dice.choice(parts), *tree[at:]],
            tree[::-1],
            tree * 2 if len(tree) < 50 else tree,
        )
    )


def _replacement(value: Any, dice: random.Random, parts: list[Any]) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.6:
        return dice.choice((value + 1, value - 1, -value, value * 2, value ^ 1, *_NUMBERS))
    if isinstance(value, str) and value and dice.random() < 0.4:
        at = dice.randrange(len(value))
        return dice.choice(
            (value[:at], value[at:], value * 2, value[:at] + dice.choice(_TEXTS) + value[at:])
        )
    if isinstance(value, bytes) and value and dice.random() < 0.6:
        at = dice.randrange(len(value))
        return dice.choice(
            (value[:at], value[at:], value[:at] + bytes([dice.randrange(256)]) + value[at + 1 :])
        )
    pool = dice.choice((_NUMBERS, _EXTREMES, _TEXTS, _OTHERS, parts))
    return dice.choice(pool)
