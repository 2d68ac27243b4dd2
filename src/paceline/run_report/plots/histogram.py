"""How stale updates were: a row of bars for each worker, all over the same axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from paceline.figures import percent, short_number
from paceline.run_report.plots.canvas import WIDTH, line, rect, svg, text
from paceline.telemetry.staleness import WorkerReport

MOST = 16  # rows
_MAX_BINS = 24
_LEFT, _RIGHT, _TOP = 84, WIDTH - 76, 26


def staleness_rows(workers: Sequence[WorkerReport], title: str) -> str:
    """Draw how many updates of each worker were how stale."""
    oldest = max(worker.max_staleness for worker in workers)
    width = ceil((oldest + 1) / _MAX_BINS)  # of a bin, in versions
    num_bins = oldest // width + 1
    slot = (_RIGHT - _LEFT) / num_bins
    bar = min(slot - 2, 40)
    row = 44 if len(workers) <= 4 else 32
    bottom = _TOP + row * len(workers)
    parts = [text(WIDTH - 8, 16, "mean", "name", "end")]
    for at, worker in enumerate(workers):
        base = _TOP + (at + 1) * row - 4
        parts += [text(_LEFT - 8, base - 6, f"worker {worker.worker}", "tick", "end")]
        parts += [text(WIDTH - 8, base - 6, short_number(worker.mean_staleness), "tick", "end")]
        parts += [line(_LEFT, base, _RIGHT, base, "grid")]
        parts += _bars(worker, num_bins, width, (slot, bar, base, row - 8))
    every = ceil(num_bins / 8)
    for at in range(0, num_bins, every):
        words = short_number(at * width)
        parts += [text(_LEFT + (at + 0.5) * slot, bottom + 12, words, "tick", "middle")]
    label = "staleness (versions)" if width == 1 else f"staleness (versions, {width} in a bar)"
    parts += [text((_LEFT + _RIGHT) / 2, bottom + 34, label, "name", "middle")]
    description = "Rows of bars, one row for each worker: how many updates were how stale"
    return svg(WIDTH, bottom + 42, title, description, parts)


def _bars(
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
