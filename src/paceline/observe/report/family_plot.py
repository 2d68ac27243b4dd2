"""A plot of several named lines over a logarithmic axis, as an SVG file of its own.

The elements are those of canvas.py. The page of a run has its colours in report.css; a file that
stands alone brings its own.
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
LINE_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#c2609a",
    "#c98a00",
    "#3ba3df",
    "#7c5cb5",
    "#707784",
)
_DASHES = ("", "6 4", "2 3", "10 3 2 3", "14 4")  # the first is solid
_LABEL = 16  # distance of two names
INK, SOFT, GRID = "#1b2130", "#5a6376", "#e4e7ed"


def styled(parts: Sequence[str], **attributes: str) -> str:
    """Return elements with attributes, which every viewer understands; some ignore CSS."""
    named = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f"<g {named}>{''.join(parts)}</g>"


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
    grid, axis = [], [line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "axis")]
    labels = [text(_LEFT, _TOP - 8, escaped(y_label))]
    for value, label in y.ticks(5):
        grid.append(line(_LEFT, y.at(value), _RIGHT, y.at(value), "grid"))
        labels.append(text(_LEFT - 8, y.at(value) + 4, label, "", "end"))
    for value in sorted(set(xs)):
        axis.append(line(x.at(value), _BOTTOM, x.at(value), _BOTTOM + 5, "axis"))
        labels.append(text(x.at(value), _BOTTOM + 20, f"{value:,.6g}", "", "middle"))
    labels.append(text((_LEFT + _RIGHT) / 2, _HEIGHT - 10, escaped(x_label), "", "middle"))
    title_text = text(_LEFT, 20, escaped(title, 90))
    inside = [
        styled([title_text], fill=INK, font_size="15", font_weight="600"),
        styled(grid, stroke=GRID),
        styled(axis, stroke=SOFT),
        styled(labels, fill=SOFT),
        *_lines(lines, x, y),
    ]
    font = "system-ui, Helvetica, sans-serif"
    parts = [
        '<rect width="100%" height="100%" fill="#fff"/>',
        styled(inside, font_family=font, font_size="13"),
    ]
    drawn = svg(_WIDTH, _HEIGHT, escaped(title, 90), escaped(", ".join(lines), 200), parts)
    return drawn.replace(
        "<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" ', 1
    )


def _lines(lines: Mapping[str, Points], x: AxisScale, y: AxisScale) -> list[str]:
    """Return the lines with their names. "ps, 1 Gbit/s" has the colour of "ps", dashed."""
    parts: list[str] = []
    ends: list[tuple[float, str, str]] = []
    variants: dict[str, int] = {}  # by colour family, so far
    for name, points in lines.items():
        family = name.partition(", ")[0]
        variant = variants[family] = variants.get(family, -1) + 1
        colour = LINE_COLOURS[list(variants).index(family) % len(LINE_COLOURS)]
        placed = [(x.at(a), y.at(b)) for a, b in sorted(points)]
        if len(placed) > 1:
            look = {"fill": "none", "stroke": colour, "stroke_width": "2"}
            look |= {"stroke_dasharray": _DASHES[variant % len(_DASHES)]} if variant else {}
            parts.append(styled([polyline(placed, "line")], **look))
        parts.append(styled([polyline([point], "dot") for point in placed], fill=colour))
        ends.append((placed[-1][1], colour, name))
    ends.sort()
    heights: list[float] = []
    for height, _, _ in ends:  # labels keep a distance of one line
        heights.append(max([height + 4, *(one + _LABEL for one in heights[-1:])]))
    for at in reversed(range(len(ends))):  # and stay above the axis
        lowest = _BOTTOM - _LABEL * (len(ends) - 1 - at)
        heights[at] = min(heights[at], lowest)
    for height, (_, colour, name) in zip(heights, ends, strict=True):
        parts.append(styled([text(_RIGHT + 12, height, escaped(name, 32))], fill=colour))
    return parts
