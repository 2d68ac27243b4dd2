"""One step on one clock: a lane for each process, a bar for each thing that it did."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.figures import short_duration
from paceline.run_report.lanes import Lane, Picture
from paceline.run_report.plots.canvas import WIDE, Scale, line, rect, svg, text
from paceline.run_report.words import shown, time_unit

MOST = 24  # lanes
_LEFT, _RIGHT, _TOP = 110, WIDE - 16, 8
_GAP = 8


def gantt(picture: Picture, lanes: Sequence[Lane]) -> str:
    """Draw a step."""
    unit_s, unit = time_unit(picture.span_s)
    x = Scale(0.0, picture.span_s / unit_s, _LEFT, _RIGHT)
    rows: list[str] = []
    top = float(_TOP)
    for lane in lanes:
        bar = 20.0 if lane.depth == 1 else 13.0
        height = lane.depth * (bar + 1)
        rows += _lane(lane, top, bar, x, unit_s)
        top += height + _GAP
        rows += [line(_LEFT, top - _GAP / 2, _RIGHT, top - _GAP / 2, "grid")]
    parts = []
    for value, words in x.ticks(6):
        parts += [line(x.at(value), _TOP, x.at(value), top - _GAP / 2, "grid")]
        parts += [text(x.at(value), top + 14, words, "tick", "middle")]
    label = f"time since the step began ({unit})"
    parts += [*rows, text((_LEFT + _RIGHT) / 2, top + 34, label, "name", "middle")]
    return svg(WIDE, top + 42, "One step of every worker", shown(picture.words, 300), parts)


def _lane(lane: Lane, top: float, bar: float, x: Scale, unit_s: float) -> list[str]:
    name = shown(lane.name, 14)
    middle = top + lane.depth * (bar + 1) / 2
    parts = [text(_LEFT - 10, middle + 4, name, "tick", "end")]
    for one in lane.bars:
        left, right = x.at(one.begin_s / unit_s), x.at(one.end_s / unit_s)
        what, took = shown(one.name), short_duration(one.end_s - one.begin_s)
        tip = f"{name}: {what}, {took}"
        y = top + one.depth * (bar + 1)
        parts.append(rect(left, y, max(right - left, 0.6), bar, f"k-{one.kind} bar", tip))
        room = int((right - left - 8) / 6.6)
        if room >= min(len(one.name), 4) and bar >= 13:
            words = shown(one.name, max(room, 2))
            size = "" if bar >= 20 else " small"
            at = y + bar / 2 + (4 if bar >= 20 else 3.5)
            parts.append(text(left + 4, at, words, f"in-{one.kind}{size}"))
    return parts
