"""What several processes did at the same time: lanes of bars on one clock.

A `Picture` of one step comes from the run's trace where there is one, which knows every bucket and
every push; else from the times of the step, which know its three parts. Of a trace only complete
events ("X") and the names of processes ("M") are looked at; steps are events called "step N", and
of several the one with the median duration is shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec import UnsetType

from paceline.observe.report.canvas import usable
from paceline.observe.telemetry.chrome_trace import COMPLETE, PROCESS_NAME, TraceEvent, decode
from paceline.observe.telemetry.step_times import StepTimes
from paceline.runtime.formatting import duration

# Kinds of bars, in the order of the legend.
LANE_KINDS = ("input", "compute", "exchange", "wait", "other")


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


def read_trace(path: Path) -> Picture | None:
    """Draw a step of a trace; None when there is none in it. ValueError: it is no trace."""
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MB")
    events = decode(path.read_bytes())
    names = {e.pid: str(e.args.get("name", "")) for e in events if e.name == PROCESS_NAME}
    return _picture(list(_spans(events)), names)


def _spans(events: Iterable[TraceEvent]) -> Iterable[_Span]:
    for event in events:
        begin_s, took_s = _seconds(event.ts), _seconds(event.dur)
        if event.ph == COMPLETE and begin_s is not None and took_s is not None and took_s > 0:
            whom = event.args.get("for")  # of a wait
            name = event.name if whom is None else f"{event.name} for {whom}"
            yield _Span(event.pid, event.tid, name, begin_s, begin_s + took_s)


def _seconds(microseconds: float | UnsetType) -> float | None:
    value = None if isinstance(microseconds, UnsetType) else usable(microseconds)
    return None if value is None else value / 1e6


def _picture(spans: Sequence[_Span], names: Mapping[int | str, str]) -> Picture | None:
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
    words = f"Step {step} of the trace ({len(steps)} steps), which took {took}."
    if end_s - begin_s > 1.5 * max(span.end_s - span.begin_s for span in steps[step]):
        words += " Workers run free: from the first that began it to the last that ended it."
    return Picture(lanes, end_s - begin_s, words)


def _in_order(number: int | str) -> tuple[bool, float, str]:
    """Sort numbers as such, and before everything else."""
    value = usable(number) if isinstance(number, int) else None
    return (value is None, value or 0.0, str(number))


def _typical(steps: dict[int, list[_Span]]) -> int:
    most = max(len(told) for told in steps.values())
    whole = [step for step, told in steps.items() if len(told) == most]
    whole.sort(key=lambda step: max(span.end_s - span.begin_s for span in steps[step]))
    return whole[len(whole) // 2]


def _lane(name: str, origin_s: float, spans: Sequence[_Span]) -> Lane:
    """Give every bar a row: below those of its thread that it lies in, threads below each other."""
    bars: list[Bar] = []
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
                kind = kind_of(span.name)
                begin_s, end_s = span.begin_s - origin_s, span.end_s - origin_s
                bars.append(Bar(begin_s, end_s, kind, span.name, top + depth))
        top += len(ends)
    return Lane(name, tuple(bars))


def kind_of(name: str) -> str:
    """Say what kind of work a span of that name is."""
    small = name[:200].lower()
    for kind, words in _KINDS:
        if any(word in small for word in words):
            return kind
    return "other"
