"""The files of a run directory that are written and read: events.jsonl and trace.json.

events.jsonl is the record of a run, one event per line, readable while it grows:

    {"t":0.0,"event":{"type":"run","run":"20261117-0712-train-3f2a", ...}}
    {"t":4.8,"event":{"type":"progress","rank":0,"step":12, ...}}
    {"t":9.3,"event":{"type":"end","exit_code":0, ...}}

`t` is seconds since the start of the job. A line may be truncated (full disk, killed launcher) and
a file may come from another program: `EventReader` yields the lines it understands and counts the
rest. JSON has no infinity and no NaN: they are written as "nan", "inf" and "-inf".

trace.json has Chrome's format, which Perfetto and chrome://tracing open. `decode_trace` also reads
traces of other programs: it skips events that lack a required field or have it in another form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from paceline.observe.telemetry.events import ProgressReport, Recorded

CONFIG_FILE, EVENTS_FILE, TRACE_FILE = "config.json", "events.jsonl", "trace.json"
_MAX_LINE_BYTES = 16 << 20
_LAST_BYTES = 1 << 16  # the last line of a finished record begins within these


class EventLine(msgspec.Struct, frozen=True):
    """One line of events.jsonl."""

    t: float
    event: Recorded


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(EventLine, strict=False)  # accepts "nan" as a number


def encode_event(t: float, event: Recorded) -> bytes:
    """Return a line with its newline."""
    line = EventLine(round(t, 4), event)
    if isinstance(event, ProgressReport) and not all(map(math.isfinite, event.values.values())):
        plain = msgspec.to_builtins(line)
        values = plain["event"]["values"]
        values.update((k, str(v)) for k, v in values.items() if not math.isfinite(v))
        return _encoder.encode(plain) + b"\n"
    return _encoder.encode(line) + b"\n"


@dataclass
class EventReader:
    """Reads events.jsonl."""

    path: Path
    damaged: int = 0  # lines so far that are truncated or not events

    def lines(self) -> Iterator[EventLine]:
        with open(self.path, "rb") as file:
            while data := file.readline(_MAX_LINE_BYTES):
                line = _decoded(data)
                if line is None:
                    self.damaged += 1
                else:
                    yield line


def _decoded(data: bytes) -> EventLine | None:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def last_line(path: Path) -> EventLine | None:
    """Return the last line of a record without reading all of it; None if there is none yet."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LAST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    return _decoded(lines[-1]) if lines else None


TRACE_COMPLETE, TRACE_INSTANT, TRACE_META = "X", "i", "M"  # kinds of trace events
PROCESS_NAME = "process_name"


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A span ("X"), an instant ("i"), or the name of a process or row ("M"); microseconds."""

    ph: str
    name: str
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float | UnsetType = UNSET
    cat: str | UnsetType = UNSET
    s: str | UnsetType = UNSET  # scope of an instant: how far it is drawn
    args: dict[str, Any] = {}


def meta(what: str, pid: int, tid: int = 0, **args: Any) -> TraceEvent:
    """Return an event that names or orders a process, or a row of it."""
    return TraceEvent(ph=TRACE_META, name=what, pid=pid, tid=tid, args=args)


def encode_trace(events: Sequence[TraceEvent], other: Mapping[str, str]) -> bytes:
    """Return the content of trace.json; `other` holds facts about the whole trace."""
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return msgspec.json.encode(content)


def decode_trace(data: bytes) -> list[TraceEvent]:
    """Return the events of a trace; raise ValueError if it is not a trace."""
    try:
        content = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"it is truncated or not JSON: {error}") from None
    entries = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ValueError("it has no traceEvents")
    events = []
    for entry in entries:
        try:
            events.append(msgspec.convert(entry, TraceEvent, strict=False))
        except (msgspec.ValidationError, OverflowError):  # noqa: PERF203 - other programs' events
            continue
    return events
