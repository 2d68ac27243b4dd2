"""Where the time of a step goes, worker by worker: stacked bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.figures import percent, short_duration
from paceline.run_report.plots.canvas import WIDTH, Scale, line, rect, svg, text
from paceline.run_report.words import time_unit
from paceline.telemetry.steps import WorkerTimes

KINDS = ("input", "compute", "wait")
_ROW, _BAR = 26, 18
_LEFT, _RIGHT, _TOP = 84, WIDTH - 16, 8
MOST = 24  # rows


def chosen(workers: Mapping[int, WorkerTimes]) -> list[int]:
    """Return whose bars to show: all of few workers, of many those who wait least and most."""
    told = [worker for worker, times in workers.items() if times.steps and times.took_s > 0]
    if len(told) <= MOST:
        return sorted(told)
    by_waiting = sorted(told, key=lambda worker: workers[worker].wait_s / workers[worker].took_s)
    return sorted(by_waiting[: MOST // 2] + by_waiting[-MOST // 2 :])


def time_bars(workers: Mapping[int, WorkerTimes], rows: Sequence[int]) -> str:
    """Draw what a mean step of each worker consists of."""
    height = _TOP + _ROW * len(rows) + 40
    longest_s = max(workers[worker].took_s / workers[worker].steps for worker in rows)
    unit_s, unit = time_unit(longest_s)
    x = Scale(0.0, longest_s / unit_s, _LEFT, _RIGHT)
    bottom = _TOP + _ROW * len(rows)
    parts = []
    for value, words in x.ticks():
        parts += [line(x.at(value), _TOP, x.at(value), bottom, "grid")]
        parts += [text(x.at(value), bottom + 16, words, "tick", "middle")]
    for at, worker in enumerate(rows):
        parts += _row(f"worker {worker}", workers[worker], _TOP + at * _ROW, x, unit_s)
    parts += [line(_LEFT, _TOP, _LEFT, bottom, "axis")]
    label = f"mean time of a step ({unit})"
    parts += [text((_LEFT + _RIGHT) / 2, height - 6, label, "name", "middle")]
    return svg(WIDTH, height, "Where the time of a step goes", "A bar for each worker", parts)


def _row(name: str, times: WorkerTimes, top: float, x: Scale, unit_s: float) -> list[str]:
    parts = [text(_LEFT - 8, top + _ROW / 2 + 4, name, "tick", "end")]
    begin_s = 0.0
    for kind in KINDS:
        total_s = {"input": times.input_s, "compute": times.compute_s, "wait": times.wait_s}[kind]
        mean_s, share = total_s / times.steps, total_s / times.took_s
        left, right = x.at(begin_s / unit_s), x.at((begin_s + mean_s) / unit_s)
        begin_s += mean_s
        if right - left < 0.2:
            continue
        tip = f"{name}: {kind} {short_duration(mean_s)}, {percent(share)} of a step"
        y = top + (_ROW - _BAR) / 2
        parts.append(rect(left, y, right - left, _BAR, f"k-{kind}", tip))
        if right - left > 44:
            words = percent(share)
            parts.append(text((left + right) / 2, y + 13.5, words, f"in-{kind}", "middle"))
    return parts
