"""Who waited for whom: a square for each pair of workers, darker for longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from paceline.figures import short_duration
from paceline.run_report.plots.canvas import rect, svg, text

MOST = 24  # workers on either side
_NUMBERS = 14  # up to so many workers there is room for a number in each square
_LEFT, _TOP = 84, 52
SHADES = 10
Matrix = Mapping[int, Mapping[int, float]]  # who waited -> for whom -> seconds


def busiest(matrix: Matrix) -> list[int]:
    """Return the workers to show: all of few, else those that have most to do with waiting."""
    weight: dict[int, float] = {}
    for waiter, waited in matrix.items():
        weight[waiter] = weight.get(waiter, 0.0) + sum(waited.values())
        for culprit, time_s in waited.items():
            weight[culprit] = weight.get(culprit, 0.0) + 2 * time_s
    most = sorted(weight, key=lambda worker: (-weight[worker], worker))[:MOST]
    return sorted(most)


def wait_matrix(matrix: Matrix, workers: Sequence[int]) -> str:
    """Draw for how long each waited (row) for each (column)."""
    has_numbers = len(workers) <= _NUMBERS
    wide = 58.0 if len(workers) <= 8 else 46.0 if has_numbers else 20.0
    high = 34.0 if has_numbers else wide
    right, bottom = _LEFT + wide * len(workers), _TOP + high * len(workers)
    parts = [text((_LEFT + right) / 2, 16, "... waited for worker", "name", "middle")]
    parts += [text(_LEFT - 10, _TOP - 10, "worker ...", "name", "end")]
    for at in range(0, len(workers), 1 if has_numbers else 4):
        name = str(workers[at])
        parts += [text(_LEFT + (at + 0.5) * wide - 1, _TOP - 10, name, "tick", "middle")]
        parts += [text(_LEFT - 10, _TOP + (at + 0.5) * high + 3, name, "tick", "end")]
    longest_s = max(matrix.get(a, {}).get(b, 0.0) for a in workers for b in workers)
    for row, waiter in enumerate(workers):
        for column, culprit in enumerate(workers):
            time_s = matrix.get(waiter, {}).get(culprit, 0.0)
            x, y = _LEFT + column * wide, _TOP + row * high
            shade = _shade(time_s, longest_s)
            tip = f"worker {waiter} waited for worker {culprit}: {short_duration(time_s)}"
            parts.append(rect(x, y, wide - 2, high - 2, f"h{shade}", tip))
            if has_numbers and time_s > 0:
                css = "on-dark small" if shade > SHADES / 2 else "small"
                middle = x + wide / 2 - 1
                parts += [text(middle, y + high / 2 + 3, short_duration(time_s), css, "middle")]
    description = "A square for each pair of workers, with the time that one waited for the other"
    width = max(right + 12, 300)  # drawn not much larger than it is: few squares stay small
    most = f"{width * 1.1:.0f}px"
    return svg(width, bottom + 10, "Who waited for whom", description, parts, most)


def _shade(time_s: float, longest_s: float) -> int:
    """Return how dark a square is; it is empty only where nobody waited."""
    return min(ceil(SHADES * time_s / longest_s), SHADES) if longest_s > 0 else 0
