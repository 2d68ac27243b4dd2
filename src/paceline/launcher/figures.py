"""Numbers as people read them: short, and never cut.

`width_of` counts the columns that a text takes on a terminal, where Chinese characters take two.
"""

from __future__ import annotations

import math
import re
import unicodedata

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def number(value: float) -> str:
    """Write a reported value in at most nine characters."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def rate(per_s: float) -> str:
    """Write how often something happens: three digits are all that a measured rate is good for."""
    if per_s >= 99.95:
        return f"{per_s:.0f}" if per_s < 1e7 else f"{per_s:.3g}"
    return f"{per_s:.1f}" if per_s >= 9.95 else f"{per_s:.2f}"


def megabytes(count: float) -> str:
    """Write bytes in decimal megabytes, as networks are measured."""
    millions = count / 1e6
    return f"{millions:.0f}" if millions >= 99.5 else f"{millions:.1f}"


def duration(time_s: float) -> str:
    """Write a time in its two largest units: "45 s", "3 min 10 s", "2 h 5 min", "3 d 4 h"."""
    left = round(time_s)
    for name, size, minor, minor_s in (
        ("d", 86_400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if left >= size:
            rest = left % size // minor_s
            return f"{left // size} {name}" + (f" {rest} {minor}" if rest else "")
    return f"{left} s"


def width_of(text: str) -> int:
    """Return how many columns a text takes; colours take none."""
    text = _COLOUR.sub("", text)
    if text.isascii():
        return len(text)
    return sum(_width(character) for character in text)


def cut(text: str, width: int) -> str:
    """Shorten a text without colours to so many columns, with dots where something is missing."""
    if width_of(text) <= width:
        return text
    dots = "." * min(3, width)
    room, kept = width - len(dots), ""
    for character in text:
        room -= _width(character)
        if room < 0:
            break
        kept += character
    return kept + dots


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
