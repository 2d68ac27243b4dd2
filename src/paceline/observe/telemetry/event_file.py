"""The record of a run: events.jsonl, a line for each thing that happened, readable while it grows.

    {"t":0.0,"event":{"type":"run","run":"20261117-0712-train-3f2a", ...}}
    {"t":4.8,"event":{"type":"progress","rank":0,"step":12, ...}}
    {"t":9.3,"event":{"type":"end","exit_code":0, ...}}

`t` is seconds since the start of the job. Lines may be cut (the disk was full, the launcher was
killed) and files may be foreign: `read` yields what it understands and counts what it does not.
JSON has no words for a loss that is not finite: it is written as "nan", "inf" or "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from paceline.observe.telemetry.events import (
    CoordinatorBack,
    EpochEnded,
    Filled,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Moved,
    Note,
    Preemptible,
    Progress,
    Promoted,
    Resumed,
    ServerLoad,
    Settled,
)
from paceline.observe.telemetry.staleness import TableReport

EVENTS_FILE = "events.jsonl"
FORMAT = 1
_MAX_LINE_BYTES = 16 << 20
_LAST_BYTES = 1 << 16  # within which the last line of a finished record begins


class RunStarted(msgspec.Struct, frozen=True, tag_field="type", tag="run"):
    """What was started; the first line."""

    run: str  # the name of its directory
    started: str  # ISO 8601, UTC
    command: str
    script: str
    workers: int
    servers: int = 0
    data_workers: int = 0
    pace: str = ""  # "" where the script chooses
    mesh: str = ""
    host: str = ""
    version: str = ""  # of paceline
    clock_s: float = 0.0  # the job's clock (observe/telemetry/clock.py) at t = 0
    format: int = FORMAT


class RunEnded(msgspec.Struct, frozen=True, tag_field="type", tag="end"):
    """How it ended; the last line."""

    exit_code: int
    wall_s: float
    words: str = ""  # the closing line


Recorded: TypeAlias = (
    RunStarted | RunEnded | Progress | Note | TableReport | ServerLoad | Resumed | Preemptible
    | EpochEnded | MemberLost | MemberJoined | MemberLeft | Promoted | Moved | Filled
    | CoordinatorBack | Settled
)  # fmt: skip


class Line(msgspec.Struct, frozen=True):
    """One line of the file."""

    t: float
    event: Recorded


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line, strict=False)  # "nan" is a number then


def encode(t: float, event: Recorded) -> bytes:
    """Write a line, with its end."""
    line = Line(round(t, 4), event)
    if isinstance(event, Progress) and not all(map(math.isfinite, event.values.values())):
        plain = msgspec.to_builtins(line)
        values = plain["event"]["values"]
        values.update((k, str(v)) for k, v in values.items() if not math.isfinite(v))
        return _encoder.encode(plain) + b"\n"
    return _encoder.encode(line) + b"\n"


@dataclass
class Reading:
    """What was found in a file; `lines` is complete when it has been gone through."""

    path: Path
    damaged: int = 0  # lines that are cut, or none of ours

    def lines(self) -> Iterator[Line]:
        with open(self.path, "rb") as file:
            while data := file.readline(_MAX_LINE_BYTES):
                line = _decoded(data)
                if line is None:
                    self.damaged += 1
                else:
                    yield line


def _decoded(data: bytes) -> Line | None:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def last_line(path: Path) -> Line | None:
    """Return the last line of a record, without reading all of it; None when there is none yet."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LAST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    return _decoded(lines[-1]) if lines else None
