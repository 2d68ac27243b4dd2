"""What paces and codecs have in common as texts: numbers of some kind, and words that were meant.

No torch: the command line imports this.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable

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


def near(word: str, words: Iterable[str]) -> str:
    """Return " (did you mean ...?)" for the word that was probably meant; "" if there is none."""
    found = difflib.get_close_matches(word[:40].lower(), list(words), n=1)
    return f" (did you mean {found[0]}?)" if found else ""
