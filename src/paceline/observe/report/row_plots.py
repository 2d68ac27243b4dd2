"""Plots with a row for each worker, process or kind.

The time of a step; staleness of updates; waits between workers; one step on one clock; the
timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from paceline.observe.report.canvas import (
    WIDE,
    WIDTH,
    AxisScale,
    coordinate,
    escaped,
    line,
    rect,
    svg,
    text,
    time_unit,
)
from paceline.observe.report.history import KINDS, TimelineEntry
from paceline.observe.report.trace_lanes import Lane, StepTimeline
from paceline.observe.telemetry.staleness import WorkerReport
from paceline.observe.telemetry.step_times import WorkerTimes
from paceline.runtime.formatting import percent, short_duration, short_number

STEP_PARTS = ("input", "compute", "wait")
_BAR_ROW, _BAR = 26, 18
_LEFT, _BAR_RIGHT, _BAR_TOP = 84, WIDTH - 16, 8  # _LEFT: room for the name of a worker
MAX_BARS = 24  # rows


def choose_workers(workers: Mapping[int, WorkerTimes]) -> list[int]:
    """Return the workers to show: all of few; of many, those that wait least and most."""
    timed = [worker for worker, times in workers.items() if times.steps and times.took_s > 0]
    if len(timed) <= MAX_BARS:
        return sorted(timed)
    by_waiting = sorted(timed, key=lambda worker: workers[worker].wait_s / workers[worker].took_s)
    return sorted(by_waiting[: MAX_BARS // 2] + by_waiting[-MAX_BARS // 2 :])


def time_bars(workers: Mapping[int, WorkerTimes], rows: Sequence[int]) -> str:
    """Return a plot of the parts of a mean step of each worker."""
    height = _BAR_TOP + _BAR_ROW * len(rows) + 40
    longest_s = max(workers[worker].took_s / workers[worker].steps for worker in rows)
    unit_s, unit = time_unit(longest_s)
    x = AxisScale(0.0, longest_s / unit_s, _LEFT, _BAR_RIGHT)
    bottom = _BAR_TOP + _BAR_ROW * len(rows)
    parts = _x_grid(x, _BAR_TOP, bottom, 4)
    for at, worker in enumerate(rows):
        parts += _bar_row(f"worker {worker}", workers[worker], _BAR_TOP + at * _BAR_ROW, x, unit_s)
    parts += [line(_LEFT, _BAR_TOP, _LEFT, bottom, "axis")]
    label = f"mean time of a step ({unit})"
    parts += [text((_LEFT + _BAR_RIGHT) / 2, height - 6, label, "name", "middle")]
    return svg(WIDTH, height, "Where the time of a step goes", "A bar for each worker", parts)


def _x_grid(x: AxisScale, top: float, bottom: float, wanted: int, gap: float = 16) -> list[str]:
    """Return vertical grid lines with labels below."""
    parts = []
    for value, label in x.ticks(wanted):
        parts += [line(x.at(value), top, x.at(value), bottom, "grid")]
        parts += [text(x.at(value), bottom + gap, label, "tick", "middle")]
    return parts


def _bar_row(name: str, times: WorkerTimes, top: float, x: AxisScale, unit_s: float) -> list[str]:
    parts = [text(_LEFT - 8, top + _BAR_ROW / 2 + 4, name, "tick", "end")]
    begin_s = 0.0
    for kind in STEP_PARTS:
        total_s = {"input": times.input_s, "compute": times.compute_s, "wait": times.wait_s}[kind]
        mean_s, share = total_s / times.steps, total_s / times.took_s
        left, right = x.at(begin_s / unit_s), x.at((begin_s + mean_s) / unit_s)
        begin_s += mean_s
        if right - left < 0.2:
            continue
        tip = f"{name}: {kind} {short_duration(mean_s)}, {percent(share)} of a step"
        y = top + (_BAR_ROW - _BAR) / 2
        parts.append(rect(left, y, right - left, _BAR, f"k-{kind}", tip))
        if right - left > 44:
            middle = (left + right) / 2
            parts.append(text(middle, y + 13.5, percent(share), f"in-{kind}", "middle"))
    return parts


MAX_HISTOGRAMS = 16  # rows
_MAX_BINS = 24
_BIN_RIGHT, _BIN_TOP = WIDTH - 76, 26


def staleness_rows(workers: Sequence[WorkerReport], title: str) -> str:
    """Return a histogram of the staleness of each worker's updates."""
    oldest = max(worker.max_staleness for worker in workers)
    width = ceil((oldest + 1) / _MAX_BINS)  # of a bin, in versions
    num_bins = oldest // width + 1
    slot = (_BIN_RIGHT - _LEFT) / num_bins
    bar = min(slot - 2, 40)
    row = 44 if len(workers) <= 4 else 32
    bottom = _BIN_TOP + row * len(workers)
    parts = [text(WIDTH - 8, 16, "mean", "name", "end")]
    for at, worker in enumerate(workers):
        base = _BIN_TOP + (at + 1) * row - 4
        parts += [text(_LEFT - 8, base - 6, f"worker {worker.worker}", "tick", "end")]
        parts += [text(WIDTH - 8, base - 6, short_number(worker.mean_staleness), "tick", "end")]
        parts += [line(_LEFT, base, _BIN_RIGHT, base, "grid")]
        parts += _bins(worker, num_bins, width, (slot, bar, base, row - 8))
    every = ceil(num_bins / 8)
    for at in range(0, num_bins, every):
        x, age = _LEFT + (at + 0.5) * slot, short_number(at * width)
        parts += [text(x, bottom + 12, age, "tick", "middle")]
    label = "staleness (versions)" if width == 1 else f"staleness (versions, {width} in a bar)"
    parts += [text((_LEFT + _BIN_RIGHT) / 2, bottom + 34, label, "name", "middle")]
    description = "A histogram for each worker: the number of updates by staleness"
    return svg(WIDTH, bottom + 42, title, description, parts)


def _bins(
    worker: WorkerReport, num_bins: int, width: int, sizes: tuple[float, float, float, float]
) -> list[str]:
    slot, bar, base, high = sizes
    bins = [0] * num_bins
    for age, count in worker.staleness.items():
        bins[age // width] += count
    fullest, counted = max(bins), sum(bins)
    parts = []
    for at, count in enumerate(bins):
        if not count:
            continue
        ages = f"{at * width}" if width == 1 else f"{at * width} to {(at + 1) * width - 1}"
        tip = (
            f"worker {worker.worker}: {short_number(count)} updates"
            f" ({percent(count / counted)}) were {ages} versions stale"
        )
        height = max(1.0, high * count / fullest)
        left = _LEFT + at * slot + (slot - bar) / 2
        parts.append(rect(left, base - height, bar, height, "k-compute", tip))
    return parts


MAX_SQUARES = 24  # workers on either side
_NUMBERS = 14  # with more workers there is no room for a number in each square
_SQUARE_TOP = 52
SHADES = 10
Matrix = Mapping[int, Mapping[int, float]]  # waiting worker -> worker waited for -> seconds


def choose_waiting_workers(matrix: Matrix) -> list[int]:
    """Return the workers to show: all of few, else those with the longest waits."""
    weight: dict[int, float] = {}
    for waiter, waited in matrix.items():
        weight[waiter] = weight.get(waiter, 0.0) + sum(waited.values())
        for other, time_s in waited.items():
            weight[other] = weight.get(other, 0.0) + 2 * time_s
    most = sorted(weight, key=lambda worker: (-weight[worker], worker))[:MAX_SQUARES]
    return sorted(most)


def wait_matrix(matrix: Matrix, workers: Sequence[int]) -> str:
    """Return a matrix of how long each worker (row) waited for each other worker (column)."""
    has_numbers = len(workers) <= _NUMBERS
    wide = 58.0 if len(workers) <= 8 else 46.0 if has_numbers else 20.0
    high = 34.0 if has_numbers else wide
    right, bottom = _LEFT + wide * len(workers), _SQUARE_TOP + high * len(workers)
    parts = [text((_LEFT + right) / 2, 16, "... waited for worker", "name", "middle")]
    parts += [text(_LEFT - 10, _SQUARE_TOP - 10, "worker ...", "name", "end")]
    for at in range(0, len(workers), 1 if has_numbers else 4):
        name = str(workers[at])
        parts += [text(_LEFT + (at + 0.5) * wide - 1, _SQUARE_TOP - 10, name, "tick", "middle")]
        parts += [text(_LEFT - 10, _SQUARE_TOP + (at + 0.5) * high + 3, name, "tick", "end")]
    longest_s = max(matrix.get(a, {}).get(b, 0.0) for a in workers for b in workers)
    for row, waiter in enumerate(workers):
        for column, other in enumerate(workers):
            time_s = matrix.get(waiter, {}).get(other, 0.0)
            x, y = _LEFT + column * wide, _SQUARE_TOP + row * high
            shade = _shade(time_s, longest_s)
            tip = f"worker {waiter} waited for worker {other}: {short_duration(time_s)}"
            parts.append(rect(x, y, wide - 2, high - 2, f"h{shade}", tip))
            if has_numbers and time_s > 0:
                css = "on-dark small" if shade > SHADES / 2 else "small"
                middle = x + wide / 2 - 1
                parts += [text(middle, y + high / 2 + 3, short_duration(time_s), css, "middle")]
    description = "A square for each pair of workers: how long one waited for the other"
    width = max(right + 12, 300)  # limits the scaling: few squares stay small
    most = f"{width * 1.1:.0f}px"
    return svg(width, bottom + 10, "Waits between workers", description, parts, most)


def _shade(time_s: float, longest_s: float) -> int:
    """Return the shade of a square; it is empty only if there was no wait."""
    return min(ceil(SHADES * time_s / longest_s), SHADES) if longest_s > 0 else 0


MAX_LANES = 24  # lanes
_CLOCK_LEFT, _CLOCK_RIGHT, _LANE_TOP = 110, WIDE - 16, 8
_GAP = 8


def gantt(step: StepTimeline, lanes: Sequence[Lane]) -> str:
    """Return a plot of one step: what each process did when."""
    unit_s, unit = time_unit(step.span_s)
    x = AxisScale(0.0, step.span_s / unit_s, _CLOCK_LEFT, _CLOCK_RIGHT)
    rows: list[str] = []
    top = float(_LANE_TOP)
    for lane in lanes:
        bar = 20.0 if lane.depth == 1 else 13.0
        height = lane.depth * (bar + 1)
        rows += _lane(lane, top, bar, x, unit_s)
        top += height + _GAP
        rows += [line(_CLOCK_LEFT, top - _GAP / 2, _CLOCK_RIGHT, top - _GAP / 2, "grid")]
    label = f"time since the step began ({unit})"
    parts = _x_grid(x, _LANE_TOP, top - _GAP / 2, 6, gap=14 + _GAP / 2)
    parts += [*rows, text((_CLOCK_LEFT + _CLOCK_RIGHT) / 2, top + 34, label, "name", "middle")]
    return svg(WIDE, top + 42, "One step of every worker", escaped(step.caption, 300), parts)


def _lane(lane: Lane, top: float, bar: float, x: AxisScale, unit_s: float) -> list[str]:
    name = escaped(lane.name, 14)
    middle = top + lane.depth * (bar + 1) / 2
    parts = [text(_CLOCK_LEFT - 10, middle + 4, name, "tick", "end")]
    for one in lane.bars:
        left, right = x.at(one.begin_s / unit_s), x.at(one.end_s / unit_s)
        what, took = escaped(one.name), short_duration(one.end_s - one.begin_s)
        tip = f"{name}: {what}, {took}"
        y = top + one.depth * (bar + 1)
        parts.append(rect(left, y, max(right - left, 0.6), bar, f"k-{one.kind} bar", tip))
        room = int((right - left - 8) / 6.6)
        if room >= min(len(one.name), 4) and bar >= 13:
            label = escaped(one.name, max(room, 2))
            size = "" if bar >= 20 else " small"
            at = y + bar / 2 + (4 if bar >= 20 else 3.5)
            parts.append(text(left + 4, at, label, f"in-{one.kind}{size}"))
    return parts


_MARK_TOP, _MARK_ROW = 6, 24


def timeline(entries: Sequence[TimelineEntry], end_s: float) -> str:
    """Return a plot of events between the start of the run and its end."""
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in entries)]
    unit_s, unit = time_unit(end_s)
    x = AxisScale(0.0, max(end_s / unit_s, 1e-6), _CLOCK_LEFT, _CLOCK_RIGHT)
    bottom = _MARK_TOP + _MARK_ROW * len(kinds)
    parts = _x_grid(x, _MARK_TOP, bottom, 6)
    for at, kind in enumerate(kinds):
        middle = _MARK_TOP + (at + 0.5) * _MARK_ROW
        parts += [text(_CLOCK_LEFT - 10, middle + 4, KINDS[kind], "tick", "end")]
        parts += [line(_CLOCK_LEFT, middle, _CLOCK_RIGHT, middle, "grid")]
        for one in (one for one in entries if one.kind == kind):
            tip = f"{short_duration(one.t)}: {escaped(one.text, 160)}"
            parts.append(
                f'<circle cx="{coordinate(x.at(one.t / unit_s))}" cy="{coordinate(middle)}" r="5"'
                f' class="e-{kind}"><title>{tip}</title></circle>'
            )
    parts += [
        text((_CLOCK_LEFT + _CLOCK_RIGHT) / 2, bottom + 36, f"time ({unit})", "name", "middle")
    ]
    description = "A mark for each loss, joining, epoch and note, over the time of the run"
    return svg(WIDE, bottom + 44, "What happened when", description, parts)
