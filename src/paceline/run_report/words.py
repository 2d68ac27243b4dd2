"""How names and numbers from a run get onto the page: escaped, and in a range that can be drawn.

Whatever a run brings along (names, notes, its command) is foreign text. `shown` is the only way for
it into the page: what HTML would take for markup is escaped, control characters and marks that
turn the direction of text around are made visible, and long text is cut.
"""

from __future__ import annotations

import html
import math
import re

from paceline.figures import exponent

NAME_LIMIT = 48
TEXT_LIMIT = 600
_HUGE = 1e30  # a value beyond it is as good as infinite, and can be drawn by nobody
_TINY = 1e-30  # and one below this is as good as 0
_LONG_S = 1e9  # thirty years
# Controls without tab and line feed, surrogates, and what embeds, overrides or isolates directions.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def shown(text: object, limit: int = NAME_LIMIT) -> str:
    """Return foreign text as HTML, in one line of at most `limit` characters."""
    raw = str(text)
    cut = raw if len(raw) <= limit else raw[: limit - 1] + "\u2026"
    visible = _INVISIBLE.sub("\ufffd", cut.replace("\r\n", " "))
    return html.escape(" ".join(visible.split()), quote=True)


def usable(value: float) -> float | None:
    """Return a value that can be drawn; None for what is not finite, or as good as that."""
    try:
        number = float(value)
    except OverflowError:
        return None
    if abs(number) < _TINY:
        return 0.0
    return number if abs(number) < _HUGE else None  # NaN compares false


def seconds_of(value: float) -> float:
    """Return a duration or a moment of a run, between 0 and 30 years."""
    number = usable(value)
    return 0.0 if number is None else min(max(number, 0.0), _LONG_S)


def count_of(value: int) -> int:
    """Return a count between 0 and what a float still holds exactly."""
    return min(max(value, 0), 1 << 53)


def tick(value: float, step: float) -> str:
    """Write a value on an axis, as exactly as the distance of its ticks asks for."""
    if value == 0:
        return "0"
    size = max(abs(value), step)
    if size >= 1e15 or step < 1e-4:
        return exponent(f"{value:.2g}")
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 10 * factor or (size >= factor and factor > 1e3):
            return f"{value / factor:.{_decimals(step / factor)}f}{unit}"
    return f"{value:,.{_decimals(step)}f}"


def _decimals(step: float) -> int:
    return min(max(0, math.ceil(-math.log10(step) - 1e-9)), 6)


def time_unit(span_s: float) -> tuple[float, str]:
    """Choose in which unit a time axis of that length counts: its seconds, and its name."""
    for unit_s, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if span_s >= 3 * unit_s:
            return unit_s, name
    return 1e-3, "ms"
