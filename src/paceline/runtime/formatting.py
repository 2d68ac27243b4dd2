"""Formatting of numbers for the terminal, logs and reports.

Sizes of data are decimal, as for networks and disks (kB, MB); memory is binary, as its limits are
(MiB). `width_of` counts the columns of a text on a terminal, where Chinese characters take two.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def number(value: float) -> str:
    """Return a reported value in at most nine characters."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def rate(per_s: float) -> str:
    """Return a rate with three digits: a measured rate is not more precise."""
    if per_s >= 99.95:
        return f"{per_s:.0f}" if per_s < 1e7 else f"{per_s:.3g}"
    return f"{per_s:.1f}" if per_s >= 9.95 else f"{per_s:.2f}"


def short_number(value: float) -> str:
    """Return a value with three significant digits: 0.0123, 12,300, 4.56M."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not finite"
    amount = abs(value)
    if amount >= 1e15 or amount < 1e-4:
        return exponent(f"{value:.2e}")
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if amount >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:,.0f}" if amount >= 999.5 else f"{value:.3g}"


def exponent(text: str) -> str:
    """Return 1e-05 as 1e-5."""
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].replace('+', '')}{m[2]}", text)


def percent(share: float) -> str:
    """Return a share of 1 as percent: 0.4 %, 23 %."""
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 1 else f"{value:.0f} %"


def data_size(num_bytes: float) -> str:
    """Return an amount of data: 512 B, 3.5 MB."""
    return _in_units(num_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def memory_size(num_bytes: int | None) -> str:
    """Return an amount of memory: 512 B, 1.5 GiB."""
    if num_bytes is None:
        return "unknown"
    return _in_units(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _in_units(amount: float, factor: int, units: Sequence[str]) -> str:
    for unit in units:
        if amount < 999.5 or unit == units[-1]:
            break
        amount /= factor
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.3g} {unit}"


def megabytes(num_bytes: float) -> str:
    """Return the number of megabytes, without the unit: for the cells of a table column."""
    millions = num_bytes / 1e6
    return f"{millions:.0f}" if millions >= 99.5 else f"{millions:.1f}"


def duration(time_s: float) -> str:
    """Return a time in its two largest units: 350 ms, 4.2 s, 3 min 10 s, 2 h 5 min, 3 d 4 h."""
    left = round(time_s)
    for name, unit_s, minor, minor_s in (
        ("d", 86_400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if left >= unit_s:
            rest = left % unit_s // minor_s
            return f"{left // unit_s} {name}" + (f" {rest} {minor}" if rest else "")
    return short_duration(time_s)


def short_duration(time_s: float) -> str:
    """Return a time with one unit and up to three digits: 0.4 ms, 35 ms, 4.21 s."""
    if time_s == 0:
        return "0 s"
    if time_s < 0.9995:
        return f"{1000 * time_s:.3g} ms" if time_s >= 1e-6 else "0 ms"
    return f"{time_s:.3g} s" if time_s < 999.5 else f"{time_s:,.0f} s"


def duration_range(low_s: float, high_s: float) -> str:
    """Return two times, with one unit if it is the same: 142-265 ms, 850 ms-1.2 s."""
    low, high = short_duration(low_s), short_duration(high_s)
    same = low.rpartition(" ")[2] == high.rpartition(" ")[2]
    return f"{low.rpartition(' ')[0] if same else low}-{high}"


def width_of(text: str) -> int:
    """Return the number of columns of a text; color codes take none."""
    text = _COLOUR.sub("", text)
    if text.isascii():
        return len(text)
    return sum(_width(character) for character in text)


def cut(text: str, width: int) -> str:
    """Shorten a text without color codes to `width` columns, ending with dots."""
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
