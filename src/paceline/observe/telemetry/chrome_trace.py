"""trace.json, written and read: Chrome's format, which Perfetto and chrome://tracing open.

`encode` is for our own traces. `decode` also reads those of others, as far as it can: events that
lack what all have, or have it in another form, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

TRACE_FILE = "trace.json"
COMPLETE, INSTANT, META = "X", "i", "M"  # kinds of events
PROCESS_NAME = "process_name"


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A span ("X"), an instant ("i"), or a name of a process or a row ("M"); microseconds."""

    ph: str
    name: str
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float | UnsetType = UNSET
    cat: str | UnsetType = UNSET
    s: str | UnsetType = UNSET  # of an instant: how far it is drawn
    args: dict[str, Any] = {}


def meta(what: str, pid: int, tid: int = 0, **args: Any) -> TraceEvent:
    """Return an event that names or places a process, or a row of it."""
    return TraceEvent(ph=META, name=what, pid=pid, tid=tid, args=args)


def encode(events: Sequence[TraceEvent], other: Mapping[str, str]) -> bytes:
    """Return the content of trace.json; `other` is said about the whole."""
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return msgspec.json.encode(content)


def decode(data: bytes) -> list[TraceEvent]:
    """Return the events of a trace; ValueError where it is none."""
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"it is cut short or no JSON: {error}") from None
    told = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(told, list):
        raise ValueError("it has no traceEvents")
    events = []
    for one in told:
        try:
            events.append(msgspec.convert(one, TraceEvent, strict=False))
        except (msgspec.ValidationError, OverflowError):  # noqa: PERF203 - foreign
            continue
    return events
