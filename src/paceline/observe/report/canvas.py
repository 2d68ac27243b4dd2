"""SVG elements, escaping of text, and the scales that turn values into coordinates.

Colours are names of CSS classes (report.css defines them for light and dark). Text from a run
(names, notes, the command) is untrusted. It enters the page only through `escaped`, which escapes
markup, makes control characters and marks that change the direction of text visible, and cuts long
text. The drawing functions take text that is HTML already.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.runtime.formatting import exponent

NAME_LIMIT = 48
TEXT_LIMIT = 600
_HUGE = 1e30  # larger values count as infinite: they cannot be drawn
_TINY = 1e-30  # smaller values count as 0
_LONG_S = 1e9  # thirty years
# Controls without tab and line feed, surrogates, and what embeds, overrides or isolates directions.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def escaped(text: object, limit: int = NAME_LIMIT) -> str:
    """Return untrusted text as HTML, in one line of at most `limit` characters."""
    raw = str(text)
    cut = raw if len(raw) <= limit else raw[: limit - 1] + "\u2026"
    visible = _INVISIBLE.sub("\ufffd", cut.replace("\r\n", " "))
    return html.escape(" ".join(visible.split()), quote=True)


def finite_or_none(value: float) -> float | None:
    """Return a value that can be drawn; None if it is not finite or too large."""
    try:
        number = float(value)
    except OverflowError:
        return None
    if abs(number) < _TINY:
        return 0.0
    return number if abs(number) < _HUGE else None  # NaN compares false


def clamp_seconds(value: float) -> float:
    """Return a duration or a moment of a run, limited to 0 to 30 years."""
    number = finite_or_none(value)
    return 0.0 if number is None else min(max(number, 0.0), _LONG_S)


def clamp_count(value: int) -> int:
    """Return a count, limited to 0 to the largest integer that a float holds exactly."""
    return min(max(value, 0), 1 << 53)


WIDTH = 520  # of a plot that shares its row with another plot
WIDE = 1060  # of a plot with its own row


def svg(
    width: float, height: float, title: str, description: str, parts: Iterable[str], most: str = ""
) -> str:
    """Wrap a drawing, with a description for screen readers; `most`: its CSS max-width."""
    style = f' style="max-width:{most}"' if most else ""
    return (
        f'<svg viewBox="0 0 {coordinate(width)} {coordinate(height)}" role="img"{style}>'
        f"<title>{title}</title><desc>{description}</desc>{''.join(parts)}</svg>"
    )


def coordinate(value: float) -> str:
    """Return a coordinate with one decimal."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def text(x: float, y: float, content: str, css: str = "", anchor: str = "start") -> str:
    """Return a text at a position."""
    classes = f' class="{css}"' if css else ""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{coordinate(x)}" y="{coordinate(y)}"{classes}{where}>{content}</text>'


def rect(x: float, y: float, width: float, height: float, css: str, tip: str = "") -> str:
    """Return a box; `tip` is its tooltip."""
    box = (
        f'<rect x="{coordinate(x)}" y="{coordinate(y)}" width="{coordinate(max(width, 0.1))}"'
        f' height="{coordinate(max(height, 0.1))}" class="{css}"'
    )
    return f"{box}><title>{tip}</title></rect>" if tip else f"{box}/>"


def line(x1: float, y1: float, x2: float, y2: float, css: str, tip: str = "") -> str:
    """Return a straight line."""
    ends = (
        f'x1="{coordinate(x1)}" y1="{coordinate(y1)}" x2="{coordinate(x2)}" y2="{coordinate(y2)}"'
    )
    inside = f"<title>{tip}</title>" if tip else ""
    return f'<line {ends} class="{css}">{inside}</line>'


def polyline(points: Sequence[tuple[float, float]], css: str) -> str:
    """Return a line through points; a single point becomes a dot."""
    if len(points) == 1:
        x, y = points[0]
        return f'<circle cx="{coordinate(x)}" cy="{coordinate(y)}" r="2.5" class="dot {css}"/>'
    return f'<polyline points="{_joined(points)}" class="{css}"/>'


def polygon(points: Sequence[tuple[float, float]], css: str) -> str:
    """Return a filled area."""
    return f'<polygon points="{_joined(points)}" class="{css}"/>'


def _joined(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{coordinate(x)},{coordinate(y)}" for x, y in points)


@dataclass(frozen=True)
class AxisScale:
    """Maps values from `low` to `high` onto coordinates from `first` to `last`."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the coordinate of a value; values outside are put onto the edge."""
        low, high = self._mapped(self.low), self._mapped(self.high)
        share = (self._mapped(value) - low) / (high - low)
        return self.first + min(max(share, 0.0), 1.0) * (self.last - self.first)

    def _mapped(self, value: float) -> float:
        return math.log10(max(value, 1e-30)) if self.is_log else value

    def ticks(self, wanted: int = 4) -> list[tuple[float, str]]:
        """Return some round values with their labels."""
        if self.is_log and self.high / self.low >= 30:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            every = max(1, math.ceil((last - first + 1) / (wanted + 1)))
            return [(10.0**e, format_tick(10.0**e, 10.0**e)) for e in range(first, last + 1, every)]
        step = round_step((self.high - self.low) / wanted)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        values = [number * step for number in range(first, min(last, first + 2 * wanted) + 1)]
        return [(value, format_tick(value, step)) for value in values]


def round_step(step: float) -> float:
    """Return the nearest of 1, 2, 5 and 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    for factor, until in ((1.0, 1.5), (2.0, 3.5), (5.0, 7.5)):
        if step <= until * power:
            return factor * power
    return 10 * power


def padded_range(values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    """Return a non-empty range that contains the values, with some padding."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    padding = (high - low) * 0.05
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-30):
        padding = abs(high) * 0.1 if abs(high) > 1e-30 else 1.0
    is_at_zero = from_zero and low == 0.0
    return (0.0 if is_at_zero else low - padding), high + padding


def format_tick(value: float, step: float) -> str:
    """Return the label of a value, with the decimals that the distance of ticks needs."""
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
    """Return the unit of a time axis of that length: its seconds and its name."""
    for unit_s, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if span_s >= 3 * unit_s:
            return unit_s, name
    return 1e-3, "ms"
