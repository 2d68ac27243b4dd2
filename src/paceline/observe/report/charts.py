"""Plots over time, samples or steps: lines of each worker and their mean, rates, and shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.observe.report.canvas import (
    WIDTH,
    AxisScale,
    line,
    padded_range,
    polygon,
    polyline,
    rect,
    svg,
    text,
    time_unit,
)
from paceline.observe.report.series import Curve
from paceline.runtime.formatting import percent, short_duration, short_number

HEIGHT = 270
LEFT, RIGHT, TOP, BOTTOM = 58, WIDTH - 16, 30, HEIGHT - 42
COLOURS = 8  # of more workers than that, all lines have one colour
_LOG_FROM = 40.0  # the axis is logarithmic if the highest value is this many times the lowest
_LONG_START = 0.15  # share of the axis before the first value
_TIPS = 60  # columns of a plot with a tooltip
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class XAxis:
    """The x axis: values in `unit`s of that size, named by `label`."""

    label: str
    unit: float
    low: float
    high: float

    @classmethod
    def of_time(cls, low_s: float, high_s: float) -> XAxis:
        """Return an axis of time since the start of the job; a long empty start is left out."""
        unit_s, name = time_unit(high_s)
        begin_s = low_s if low_s > _LONG_START * high_s else 0.0
        return cls(f"time ({name})", unit_s, begin_s, max(high_s, begin_s + 1e-3))

    @classmethod
    def of_counts(cls, label: str, low: float, high: float) -> XAxis:
        """Return an axis of samples or steps."""
        return cls(label, 1.0, low, max(high, low + 1))

    @property
    def scale(self) -> AxisScale:
        return AxisScale(self.low / self.unit, self.high / self.unit, LEFT, RIGHT)

    def at(self, value: float) -> float:
        return self.scale.at(value / self.unit)

    def tip(self, value: float) -> str:
        """Return a value of this axis for a tooltip."""
        if self.label.startswith("time"):
            return f"at {short_duration(value)}"
        return f"at {short_number(value)} {self.label}"


def axes(x: XAxis, y: AxisScale, y_label: str) -> list[str]:
    """Return a grid with a few labelled round values."""
    parts = [text(4, TOP - 14, y_label, "name")]
    for value, label in y.ticks(5):
        at = y.at(value)
        parts += [line(LEFT, at, RIGHT, at, "grid")]
        parts += [text(LEFT - 8, at + 4, label, "tick", "end")]
    for value, label in x.scale.ticks(6):
        parts += [text(x.scale.at(value), BOTTOM + 18, label, "tick", "middle")]
    parts += [line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")]
    return [*parts, text((LEFT + RIGHT) / 2, HEIGHT - 6, x.label, "name", "middle")]


def curve_plot(
    curve: Curve, x: XAxis, *, title: str, y_label: str, marks: Sequence[float] = (),
    is_load: bool = False,
) -> str:  # fmt: skip
    """Return a plot of one value of all workers; `marks` are moments of membership changes.

    The load of servers (`is_load`) begins at zero and has no mean line.
    """
    bins = curve.all.in_order()
    low, high = min(one.low for one in bins), max(one.high for one in bins)
    is_log = not is_load and low > 0 and high / low >= _LOG_FROM
    edges = (low / 1.15, high * 1.15) if is_log else padded_range((low, high), from_zero=is_load)
    y = AxisScale(*edges, BOTTOM, TOP, is_log)
    parts = axes(x, y, y_label + (" (log)" if is_log else ""))
    parts += [line(x.at(at), TOP, x.at(at), BOTTOM, "mark") for at in marks]
    if curve.first_bad is not None:
        at = x.at(curve.first_bad[0])
        parts += [line(at, TOP, at, BOTTOM, "bad", "the first value that is not finite")]
    parts += _lines(curve, x, y, is_load)
    parts += _tips(curve, x, y_label)
    values = (bins[0].mean, bins[-1].mean, low, high)
    description = "{}: from {} to {}, lowest {}, highest {}".format(
        title, *map(short_number, values)
    )
    return svg(WIDTH, HEIGHT, title, description, parts)


def _placed(points: Points, x: XAxis, y: AxisScale) -> list[tuple[float, float]]:
    return [(x.at(a), y.at(b)) for a, b in points]


def _lines(curve: Curve, x: XAxis, y: AxisScale, is_load: bool) -> list[str]:
    mean = polyline(_placed(curve.mean(), x, y), "mean")
    if curve.is_crowded:
        bins = curve.all.in_order()
        upper = _placed([(one.x, one.high) for one in bins], x, y)
        lower = _placed([(one.x, one.low) for one in bins], x, y)
        return [polygon([*upper, *reversed(lower)], "band"), mean]
    if len(curve.workers) == 1:
        (only,) = curve.workers.values()
        return [polyline(_placed(only.points(), x, y), "only")]
    are_many = len(curve.workers) > COLOURS
    parts = []
    for at, (_, series) in enumerate(sorted(curve.workers.items())):
        # The page must not grow with the workers: with many, each has half as many points.
        drawn = series.coarsened(series.width * 2) if are_many else series
        colour = "worker many" if are_many else f"worker c{at}"
        parts.append(polyline(_placed(drawn.points(), x, y), colour + " load" * is_load))
    return parts if is_load and not are_many else [*parts, mean]


def _tips(curve: Curve, x: XAxis, y_label: str) -> list[str]:
    """Cover the plot with transparent columns that have tooltips."""
    coarse = curve.all
    while len(coarse.bins) > _TIPS:
        coarse = coarse.coarsened(coarse.width * 2)
    bins = coarse.in_order()
    places = [x.at(one.x) for one in bins]
    middles = [(a + b) / 2 for a, b in zip(places, places[1:], strict=False)]
    parts = []
    for one, left, right in zip(bins, [LEFT, *middles], [*middles, RIGHT], strict=True):
        tip = f"{x.tip(one.x)}: {y_label} {short_number(one.mean)}"
        if one.high > one.low:
            tip += f" ({short_number(one.low)} to {short_number(one.high)})"
        parts.append(rect(left, TOP, right - left, BOTTOM - TOP, "tip", tip))
    return parts


Stretch = tuple[float, float, float]  # begin, end, value
Shares = tuple[float, float, Sequence[float]]  # begin, end, amount of each kind


def rate_plot(
    stretches: Sequence[Stretch], x: XAxis, *, title: str, y_label: str, marks: Sequence[float] = ()
) -> str:
    """Return a plot of an amount per second, stretch by stretch."""
    rates = [value for _, _, value in stretches]
    y = AxisScale(*padded_range(rates, from_zero=True), BOTTOM, TOP)
    top = [((x.at(begin) + x.at(end)) / 2, y.at(value)) for begin, end, value in stretches]
    top = [(x.at(stretches[0][0]), top[0][1]), *top, (x.at(stretches[-1][1]), top[-1][1])]
    parts = axes(x, y, y_label)
    parts += [polygon([(top[0][0], BOTTOM), *top, (top[-1][0], BOTTOM)], "area")]
    parts += [line(x.at(at), TOP, x.at(at), BOTTOM, "mark") for at in marks]
    parts += [polyline(top, "only")]
    for begin, end, value in stretches:
        tip = f"{x.tip((begin + end) / 2)}: {short_number(value)} {y_label}"
        left = x.at(begin)
        parts.append(rect(left, TOP, x.at(end) - left, BOTTOM - TOP, "tip", tip))
    description = f"{title}: {short_number(min(rates))} to {short_number(max(rates))} {y_label}"
    return svg(WIDTH, HEIGHT, title, description, parts)


def share_plot(stretches: Sequence[Shares], kinds: Sequence[str], x: XAxis, *, title: str) -> str:
    """Return a plot of shares that add up to one, stretch by stretch; the first kind is lowest."""
    y = AxisScale(0.0, 100.0, BOTTOM, TOP)
    parts = axes(x, y, "share of time (%)")
    floor = [0.0] * len(stretches)
    tips = [f"{x.tip((begin + end) / 2)}:" for begin, end, _ in stretches]
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
    stretches: Sequence[Shares], heights: Sequence[float], x: XAxis, y: AxisScale
) -> list[tuple[float, float]]:
    points = []
    for (begin, end, _), height in zip(stretches, heights, strict=True):
        points += [(x.at(begin), y.at(height)), (x.at(end), y.at(height))]
    return points
