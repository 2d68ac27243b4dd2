"""What several processes did at the same time: lanes of bars on one clock.

A `Picture` of one step comes from the run's trace where there is one (`tracing.py`), which knows
every bucket and every push; else from the times of the step, which know its three parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.figures import duration
from paceline.telemetry.steps import StepTimes

# Kinds of bars, in the order of the legend.
KINDS = ("input", "compute", "exchange", "wait", "other")


@dataclass(frozen=True)
class Bar:
    """Something that a process did, in seconds since the beginning of the picture."""

    begin_s: float
    end_s: float
    kind: str
    name: str
    depth: int = 0  # under how many other bars it lies


@dataclass(frozen=True)
class Lane:
    """What one process did."""

    name: str
    bars: tuple[Bar, ...]

    @property
    def depth(self) -> int:
        """How many rows its bars need."""
        return 1 + max((bar.depth for bar in self.bars), default=0)


@dataclass(frozen=True)
class Picture:
    """One step. Names are foreign text."""

    lanes: tuple[Lane, ...]
    span_s: float
    words: str  # which step this is, and why that one


def picture_of(workers: Mapping[int, StepTimes]) -> Picture | None:
    """Draw a step from the times of its workers: first the input, at the end the waiting."""
    if not workers:
        return None
    origin_s = min(step.end_s - step.took_s for step in workers.values())
    lanes = tuple(
        Lane(f"worker {worker}", _parts(step, step.end_s - step.took_s - origin_s))
        for worker, step in workers.items()
    )
    span_s = max(step.end_s for step in workers.values()) - origin_s
    one = next(iter(workers.values()))
    took = duration(max(step.took_s for step in workers.values()))
    words = f"Step {one.step}, which took {took}: the median of the steps."
    return Picture(lanes, span_s, words) if span_s > 0 else None


def _parts(step: StepTimes, begin_s: float) -> tuple[Bar, ...]:
    bars = []
    parts = (("input", step.input_s), ("compute", step.compute_s), ("wait", step.wait_s))
    for kind, took_s in parts:
        if took_s > 0:
            bars.append(Bar(begin_s, begin_s + took_s, kind, kind))
        begin_s += took_s
    return tuple(bars)
