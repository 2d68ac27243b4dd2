"""What several processes did at the same time: lanes of bars on one clock.

A `StepTimeline` of one step comes from the run's trace if there is one, which has every bucket and
every push; else from the times of the step, which have its three parts. Of a trace only complete
events ("X") and process names ("M") are used. Steps are events named "step N"; of several, the one
with the median duration is drawn.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec import UnsetType

from paceline.observe.report.canvas import finite_or_none
from paceline.observe.telemetry.file_formats import (
    PROCESS_NAME,
    TRACE_COMPLETE,
    TraceEvent,
    decode_trace,
)
from paceline.observe.telemetry.step_times import StepTimes
from paceline.runtime.formatting import duration

# Kinds of bars, in the order of the legend.
LANE_KINDS = ("input", "compute", "exchange", "wait", "other")


@dataclass(frozen=True)
class LaneBar:
    """A span of a process, in seconds since the start of the timeline."""

    begin_s: float
    end_s: float
    kind: str
    name: str
    depth: int = 0  # its row within the lane


@dataclass(frozen=True)
class Lane:
    """The bars of one process."""

    name: str
    bars: tuple[LaneBar, ...]

    @property
    def depth(self) -> int:
        """How many rows its bars need."""
        return 1 + max((bar.depth for bar in self.bars), default=0)


@dataclass(frozen=True)
class StepTimeline:
    """One step. Names are untrusted text."""

    lanes: tuple[Lane, ...]
    span_s: float
    caption: str  # which step this is, and why it was chosen


def timeline_from_times(workers: Mapping[int, StepTimes]) -> StepTimeline | None:
    """Return a step from the times of its workers: input first, waiting last."""
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
    caption = f"Step {one.step}, which took {took}: the median of the steps."
    return StepTimeline(lanes, span_s, caption) if span_s > 0 else None


def _parts(step: StepTimes, begin_s: float) -> tuple[LaneBar, ...]:
    bars = []
    parts = (("input", step.input_s), ("compute", step.compute_s), ("wait", step.wait_s))
    for kind, took_s in parts:
        if took_s > 0:
            bars.append(LaneBar(begin_s, begin_s + took_s, kind, kind))
        begin_s += took_s
    return tuple(bars)


_MAX_BYTES = 256 << 20
_MAX_LANES = 24
_MAX_BARS = 1500
_MAX_DEPTH = 4
_STEP = re.compile(r"step (\d{1,12})\Z")
_KINDS = (  # the first that fits
    ("wait", ("wait", "park", "idle")),
    ("input", ("input", "loader", "batch", "data")),
    ("exchange", ("bucket", "reduce", "gather", "broadcast", "collective", "exchange", "push",
                  "pull", "commit", "read", "send", "recv", "receive", "scatter", "all_to_all")),
    ("compute", ("compute", "forward", "backward", "optim", "apply", "update", "codec", "encode",
                 "decode", "stage", "microbatch")),
)  # fmt: skip


class _Span(NamedTuple):
    process: int | str
    row: int | str
    name: str
    begin_s: float
    end_s: float


def read_trace(path: Path) -> StepTimeline | None:
    """Return a step of a trace; None if it has no steps. Raise ValueError if it is no trace."""
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MB")
    events = decode_trace(path.read_bytes())
    names = {e.pid: str(e.args.get("name", "")) for e in events if e.name == PROCESS_NAME}
    return _timeline(list(_spans(events)), names)


def _spans(events: Iterable[TraceEvent]) -> Iterable[_Span]:
    for event in events:
        begin_s, took_s = _seconds(event.ts), _seconds(event.dur)
        if event.ph == TRACE_COMPLETE and begin_s is not None and took_s is not None and took_s > 0:
            other = event.args.get("for")  # of a wait
            name = event.name if other is None else f"{event.name} for {other}"
            yield _Span(event.pid, event.tid, name, begin_s, begin_s + took_s)


def _seconds(microseconds: float | UnsetType) -> float | None:
    value = None if isinstance(microseconds, UnsetType) else finite_or_none(microseconds)
    return None if value is None else value / 1e6


def _timeline(spans: Sequence[_Span], names: Mapping[int | str, str]) -> StepTimeline | None:
    steps: defaultdict[int, list[_Span]] = defaultdict(list)
    for span in spans:
        if match := _STEP.match(span.name):
            steps[int(match[1])].append(span)
    if not steps:
        return None
    step = _typical(steps)
    begin_s = min(span.begin_s for span in steps[step])
    end_s = max(span.end_s for span in steps[step])
    inside = [
        span._replace(begin_s=max(span.begin_s, begin_s), end_s=min(span.end_s, end_s))
        for span in spans
        if span.end_s > begin_s and span.begin_s < end_s and not _STEP.match(span.name)
    ]
    inside = sorted(inside, key=lambda span: span.begin_s - span.end_s)[:_MAX_BARS]
    processes = sorted({span.process for span in (*inside, *steps[step])}, key=_in_order)
    lanes = tuple(
        _lane(names.get(process) or f"process {process}", begin_s,
              [span for span in inside if span.process == process])
        for process in processes[:_MAX_LANES]
    )  # fmt: skip
    took = duration(max(span.end_s - span.begin_s for span in steps[step]))
    caption = f"Step {step} of the trace ({len(steps)} steps), which took {took}."
    if end_s - begin_s > 1.5 * max(span.end_s - span.begin_s for span in steps[step]):
        caption += " Free-running workers: from the first that began it to the last that ended it."
    return StepTimeline(lanes, end_s - begin_s, caption)


def _in_order(number: int | str) -> tuple[bool, float, str]:
    """Return a sort key: numbers by value, before everything else."""
    value = finite_or_none(number) if isinstance(number, int) else None
    return (value is None, value or 0.0, str(number))


def _typical(steps: dict[int, list[_Span]]) -> int:
    most = max(len(spans) for spans in steps.values())
    complete = [step for step, spans in steps.items() if len(spans) == most]
    complete.sort(key=lambda step: max(span.end_s - span.begin_s for span in steps[step]))
    return complete[len(complete) // 2]


def _lane(name: str, origin_s: float, spans: Sequence[_Span]) -> Lane:
    """Return a lane; each bar gets a row below the bars around it, threads below each other."""
    bars: list[LaneBar] = []
    top = 0
    rows: defaultdict[int | str, list[_Span]] = defaultdict(list)
    for span in spans:
        rows[span.row].append(span)
    for row in sorted(rows, key=_in_order):
        ends: list[float] = []  # of the last bar in each row
        for span in sorted(rows[row], key=lambda span: (span.begin_s, -span.end_s)):
            free = [at for at, end_s in enumerate(ends) if end_s <= span.begin_s + 1e-9]
            depth = free[0] if free else len(ends)
            ends[depth : depth + 1] = [span.end_s]
            if top + depth < _MAX_DEPTH:
                kind = span_kind(span.name)
                begin_s, end_s = span.begin_s - origin_s, span.end_s - origin_s
                bars.append(LaneBar(begin_s, end_s, kind, span.name, top + depth))
        top += len(ends)
    return Lane(name, tuple(bars))


def span_kind(name: str) -> str:
    """Return the kind of work of a span, by its name."""
    small = name[:200].lower()
    for kind, words in _KINDS:
        if any(word in small for word in words):
            return kind
    return "other"
