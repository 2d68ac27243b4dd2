"""What paces and codecs have in common as texts: numbers of some kind, and words that were meant.

No torch: the command line imports this.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping

# These stand for the allowed values of options that are numbers.
ABOVE_0 = ("a number above 0",)
FROM_0 = ("a number, 0 or more",)
WHOLE = ("a whole number above 0",)
COUNT = ("a whole number, 0 or more",)
SHARE = ("a number above 0, up to 1",)
NUMBERS = (ABOVE_0, FROM_0, WHOLE, COUNT, SHARE)

_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")


def is_allowed(value: float, kind: tuple[str, ...]) -> bool:
    """Say whether a finite number >= 0 is of a kind."""
    if kind in (WHOLE, COUNT) and value != int(value):
        return False
    if kind is SHARE and value > 1:
        return False
    return value > 0 or kind in (FROM_0, COUNT)


def read_number(text: str, kind: tuple[str, ...]) -> float | None:
    """Return a finite number of a kind, or None for anything else."""
    value = float(text) if _NUMBER.fullmatch(text) else math.inf
    return value if math.isfinite(value) and is_allowed(value, kind) else None


def number_text(value: float) -> str:
    """Write a number in the one form in which it appears in a text: 8, not 8.0."""
    return str(int(value)) if value == int(value) and value < 1e15 else repr(float(value))


def read_options(
    items: Iterable[str],
    name: str,
    known: Mapping[str, tuple[str, ...]],
    wrong: Callable[[str], Exception],
    read: Callable[[str, str, tuple[str, ...]], str],
) -> dict[str, str]:
    """Read "key=value" for each item; `wrong` makes the error of what is not one of those known."""
    found: dict[str, str] = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise wrong(f"expected option=value, found {item.strip()[:40]!r}")
        if key not in known:
            raise wrong(
                f"{name} has no option {key[:40]!r}{near(key, known)}; its options:"
                f" {', '.join(known) or 'none'}"
            )
        if key in found:
            raise wrong(f"option {key} is given twice")
        found[key] = read(key, value, known[key])
    return found


def read_value(
    key: str, value: str, allowed: tuple[str, ...], wrong: Callable[[str], Exception]
) -> str:
    """Return an option's value in its one form: a word among those allowed, or a number."""
    if allowed not in NUMBERS:
        if value not in allowed:
            hint = near(value, allowed)
            raise wrong(f"{key}={value[:40]!r}{hint}; allowed: {', '.join(allowed)}")
        return value
    number = read_number(value, allowed)
    if number is None:
        raise wrong(f"{key}={value[:40]!r}: expected {allowed[0]}, such as {key}=1")
    return number_text(number)


def near(word: str, words: Iterable[str]) -> str:
    """Return " (did you mean ...?)" for the word that was probably meant; "" if there is none."""
    found = difflib.get_close_matches(word[:40].lower(), list(words), n=1)
    return f" (did you mean {found[0]}?)" if found else ""
