"""One step out of a trace: what every process did in it, from trace.json in Chrome's format.

Only complete events ("X") and the names of processes ("M") are looked at. Steps are events called
"step N"; of several the one with the median duration is shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.figures import duration
from paceline.run_report.lanes import Bar, Lane, Picture
from paceline.run_report.words import usable

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
    process: object
    row: object
    name: str
    begin_s: float
    end_s: float


def read_trace(path: Path) -> Picture | None:
    """Draw a step of a trace; None when there is none in it. ValueError: it is no trace."""
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MB")
    try:
        found = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"it is cut short or no JSON: {error}") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise ValueError("it has no traceEvents")
    events = [event for event in events if isinstance(event, dict)]
    return _picture(list(_spans(events)), _names(events))


def _names(events: Iterable[dict[str, Any]]) -> dict[object, str]:
    names = {}
    for event in events:
        args = event.get("args")
        if event.get("name") == "process_name" and isinstance(args, dict):
            names[_key(event.get("pid"))] = str(args.get("name", ""))
    return names


def _spans(events: Iterable[dict[str, Any]]) -> Iterable[_Span]:
    for event in events:
        begin_s, took_s = _seconds(event.get("ts")), _seconds(event.get("dur"))
        if event.get("ph") == "X" and begin_s is not None and took_s is not None and took_s > 0:
            who = _key(event.get("pid")), _key(event.get("tid"))
            yield _Span(*who, _name(event), begin_s, begin_s + took_s)


def _name(event: dict[str, Any]) -> str:
    """Return what it is called; of a wait also whom it was for."""
    name, args = str(event.get("name")), event.get("args")
    whom = args.get("for") if isinstance(args, dict) else None
    return name if whom is None else f"{name} for {whom}"


def _key(value: object) -> object:
    return value if isinstance(value, str | int | float) else str(value)


def _seconds(microseconds: object) -> float | None:
    value = usable(microseconds) if isinstance(microseconds, int | float) else None
    return None if value is None else value / 1e6


def _picture(spans: Sequence[_Span], names: dict[object, str]) -> Picture | None:
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


def _in_order(number: object) -> tuple[bool, float, str]:
    """Sort numbers as such, and before everything else."""
    value = usable(number) if isinstance(number, int | float) else None
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
    rows: defaultdict[object, list[_Span]] = defaultdict(list)
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
