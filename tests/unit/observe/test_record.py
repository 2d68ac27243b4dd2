"""The record of a run can be read while it grows, when it was cut, and when it is not one."""

from __future__ import annotations

import math
from pathlib import Path

from paceline.observe.telemetry.events import MemberLost, Note, ProgressReport, RunEnded, RunStarted
from paceline.observe.telemetry.file_formats import EventReader, encode_event
from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.observe.telemetry.step_times import StepTimes

EVENTS = [
    RunStarted("r", "2026-11-17T00:00:00Z", "paceline run train.py", "train.py", 2),
    ProgressReport(0, 3, {"loss": 0.5}, steps=(StepTimes(3, 1.5, 0.5, 0.1, 0.2, 32),)),
    Note(1, "waiting <b>\u2028 for rank 0"),
    TableReport("model", 0, 7, (WorkerReport(0, 3, {0: 2, 1: 1}, {1: 0.5}),)),
    MemberLost("worker", 1, 1, "vm:12", "killed", 2),
    RunEnded(0, 2.5),
]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(encode_event(0.5 * i, event) for i, event in enumerate(EVENTS)))
    reading = EventReader(path)
    assert [(line.t, line.event) for line in reading.lines()] == [
        (0.5 * i, event) for i, event in enumerate(EVENTS)
    ]
    assert reading.damaged == 0


def test_cut_and_foreign_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = encode_event(0.0, EVENTS[0]) + encode_event(1.0, EVENTS[1])
    foreign = b'{"a": 1}\n\xff\xfe\n[]\n\n{"t": 1, "event": {"type": "of a later version"}}\n'
    path.write_bytes(whole + foreign + encode_event(2.0, EVENTS[2])[:-10])
    reading = EventReader(path)
    assert [line.event for line in reading.lines()] == EVENTS[:2]
    assert reading.damaged == 6


def test_values_that_are_not_finite_survive(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    values = {"nan": math.nan, "inf": math.inf, "low": -math.inf, "loss": 0.5}
    path.write_bytes(encode_event(0.0, ProgressReport(0, 1, values)))
    (line,) = EventReader(path).lines()
    assert math.isnan(line.event.values.pop("nan"))
    assert line.event.values == {"inf": math.inf, "low": -math.inf, "loss": 0.5}
