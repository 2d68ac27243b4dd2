"""The record of a run: events.jsonl, a line for each thing that happened, readable while it grows.

    {"t":0.0,"event":{"type":"run","run":"20261117-0712-train-3f2a", ...}}
    {"t":4.8,"event":{"type":"progress","rank":0,"step":12, ...}}
    {"t":9.3,"event":{"type":"end","exit_code":0, ...}}

`t` is seconds since the start of the job. Lines may be cut (the disk was full, the launcher was
killed) and files may be foreign: `read` yields what it understands and counts what it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from paceline.telemetry.events import (
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
)
from paceline.telemetry.staleness import TableReport

EVENTS_FILE = "events.jsonl"
FORMAT = 1
_MAX_LINE_BYTES = 16 << 20


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
    clock_s: float = 0.0  # the job's clock (telemetry/clock.py) at t = 0
    format: int = FORMAT


class RunEnded(msgspec.Struct, frozen=True, tag_field="type", tag="end"):
    """How it ended; the last line."""

    exit_code: int
    wall_s: float
    words: str = ""  # the closing line


Recorded: TypeAlias = (
    RunStarted | RunEnded | Progress | Note | TableReport | ServerLoad | Resumed | Preemptible
    | EpochEnded | MemberLost | MemberJoined | MemberLeft | Promoted | Moved | Filled
    | CoordinatorBack
)  # fmt: skip


class Line(msgspec.Struct, frozen=True):
    """One line of the file."""

    t: float
    event: Recorded


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


def encode(t: float, event: Recorded) -> bytes:
    """Write a line, with its end."""
    return _encoder.encode(Line(round(t, 4), event)) + b"\n"


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
