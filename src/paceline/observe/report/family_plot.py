"""A plot of several named lines over a logarithmic axis, as an SVG file of its own.

The elements are those of canvas.py. The page of a run has its colours in report.css; a file that
stands alone brings its own, light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.observe.report.canvas import (
    AxisScale,
    escaped,
    line,
    polyline,
    svg,
    text,
)

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 540, 44, 350
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c2609a", "#c98a00", "#3ba3df", "#7c5cb5", "#707784")
_STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#1b2130}.t{font-weight:600;font-size:15px}"
    ".s{fill:#5a6376}line.g{stroke:#e4e7ed}line.a{stroke:#5a6376}polyline{fill:none;stroke-width:2}"
    + "".join(
        f".c{at}{{stroke:{colour}}}circle.c{at},text.c{at}{{fill:{colour};stroke:none}}"
        for at, colour in enumerate(_COLOURS)
    )
    + "</style>"
)
Points = Sequence[tuple[float, float]]


def family_plot(
    lines: Mapping[str, Points], *, title: str, x_label: str, y_label: str, is_log_y: bool = False
) -> str:
    """Return an SVG file with one line for each name; x is logarithmic."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    low_x, high_x = min(xs), max(xs)
    if low_x == high_x:
        low_x, high_x = low_x / 2, high_x * 2
    x = AxisScale(low_x, high_x, _LEFT, _RIGHT, is_log=True)
    low_y = min(ys) / 1.2 if is_log_y else 0.0
    y = AxisScale(low_y, max(ys) * (1.2 if is_log_y else 1.08) or 1.0, _BOTTOM, _TOP, is_log_y)
    parts = ['<rect width="100%" height="100%" fill="#fff"/>', _STYLE]
    parts.append(text(_LEFT, 20, escaped(title, 90), "t"))
    for value, label in y.ticks(5):
        parts.append(line(_LEFT, y.at(value), _RIGHT, y.at(value), "g"))
        parts.append(text(_LEFT - 8, y.at(value) + 4, label, "s", "end"))
    for value in sorted(set(xs)):
        parts.append(line(x.at(value), _BOTTOM, x.at(value), _BOTTOM + 5, "a"))
        parts.append(text(x.at(value), _BOTTOM + 20, f"{value:,.6g}", "s", "middle"))
    parts.append(line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "a"))
    parts.append(text((_LEFT + _RIGHT) / 2, _HEIGHT - 10, escaped(x_label), "s", "middle"))
    parts.append(text(_LEFT, _TOP - 8, escaped(y_label), "s"))
    parts += _lines(lines, x, y)
    drawn = svg(_WIDTH, _HEIGHT, escaped(title, 90), escaped(", ".join(lines), 200), parts)
    return drawn.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" ', 1)


def _lines(lines: Mapping[str, Points], x: AxisScale, y: AxisScale) -> list[str]:
    parts: list[str] = []
    ends: list[tuple[float, int, str]] = []
    for at, (name, points) in enumerate(lines.items()):
        css = f"c{at % len(_COLOURS)}"
        placed = [(x.at(a), y.at(b)) for a, b in sorted(points)]
        parts.append(polyline(placed, css))
        parts += [polyline([point], css) for point in placed]
        ends.append((placed[-1][1], at, name))
    below = 0.0
    for height, at, name in sorted(ends):  # labels keep a distance of one line
        below = max(height + 4, below + 16)
        parts.append(text(_RIGHT + 12, below, escaped(name, 32), f"c{at % len(_COLOURS)}"))
    return parts
