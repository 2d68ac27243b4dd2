"""Areas over time: how fast the run was, and what its workers did with their time."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.figures import percent, short_number
from paceline.run_report.plots.canvas import (
    WIDTH,
    Scale,
    line,
    polygon,
    polyline,
    rect,
    spanning,
    svg,
)
from paceline.run_report.plots.curves import BOTTOM, HEIGHT, TOP, XAxis, axes

Stretch = tuple[float, float, float]  # begin, end, value
Shares = tuple[float, float, Sequence[float]]  # begin, end, amount of each kind


def rate_plot(
    stretches: Sequence[Stretch], x: XAxis, *, title: str, y_label: str, marks: Sequence[float] = ()
) -> str:
    """Draw how much there was per second, stretch after stretch."""
    rates = [value for _, _, value in stretches]
    y = Scale(*spanning(rates, from_zero=True), BOTTOM, TOP)
    top = [((x.at(begin) + x.at(end)) / 2, y.at(value)) for begin, end, value in stretches]
    top = [(x.at(stretches[0][0]), top[0][1]), *top, (x.at(stretches[-1][1]), top[-1][1])]
    parts = axes(x, y, y_label)
    parts += [polygon([(top[0][0], BOTTOM), *top, (top[-1][0], BOTTOM)], "area")]
    parts += [line(x.at(at), TOP, x.at(at), BOTTOM, "mark") for at in marks]
    parts += [polyline(top, "only")]
    for begin, end, value in stretches:
        tip = f"{x.words((begin + end) / 2)}: {short_number(value)} {y_label}"
        left = x.at(begin)
        parts.append(rect(left, TOP, x.at(end) - left, BOTTOM - TOP, "tip", tip))
    words = f"{title}: {short_number(min(rates))} to {short_number(max(rates))} {y_label}"
    return svg(WIDTH, HEIGHT, title, words, parts)


def share_plot(stretches: Sequence[Shares], kinds: Sequence[str], x: XAxis, *, title: str) -> str:
    """Draw shares that add up to one, stretch after stretch, the first kind at the bottom."""
    y = Scale(0.0, 100.0, BOTTOM, TOP)
    parts = axes(x, y, "share of time (%)")
    floor = [0.0] * len(stretches)
    tips = [f"{x.words((begin + end) / 2)}:" for begin, end, _ in stretches]
    for number_of_kind, kind in enumerate(kinds):
        top = []
        for at, (_, _, amounts) in enumerate(stretches):
            share = amounts[number_of_kind] / (sum(amounts) or 1.0)
            tips[at] += f" {kind} {percent(share)}"
            top.append(floor[at] + 100 * share)
        upper = _stairs(stretches, top, x, y)
        lower = _stairs(stretches, floor, x, y)
        parts.append(polygon([*upper, *reversed(lower)], f"k-{kind}"))
        floor = top
    for (begin, end, _), tip in zip(stretches, tips, strict=True):
        parts.append(rect(x.at(begin), TOP, x.at(end) - x.at(begin), BOTTOM - TOP, "tip", tip))
    return svg(WIDTH, HEIGHT, title, f"{title}, in percent: {', '.join(kinds)}", parts)


def _stairs(
    stretches: Sequence[Shares], heights: Sequence[float], x: XAxis, y: Scale
) -> list[tuple[float, float]]:
    points = []
    for (begin, end, _), height in zip(stretches, heights, strict=True):
        points += [(x.at(begin), y.at(height)), (x.at(end), y.at(height))]
    return points
