"""Reads a trace.json as a viewer does, and refuses what a viewer would not draw."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Trace:
    """A trace that is in order; spans by process and row."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        events: list[Event] = content["traceEvents"]
        self.said: dict[str, str] = content["otherData"]
        self.processes: dict[int, str] = {}
        self.rows: dict[tuple[int, int], str] = {}
        self.spans: list[Event] = []
        self.marks: list[Event] = []
        self._read(events)
        _check_nesting(self.spans)

    def _read(self, events: list[Event]) -> None:
        at = float("-inf")
        for event in events:
            pid, tid = event["pid"], event["tid"]
            assert isinstance(pid, int) and isinstance(tid, int) and event["name"]
            if event["ph"] == "M":
                if event["name"] == "process_name":
                    self.processes[pid] = event["args"]["name"]
                elif event["name"] == "thread_name":
                    self.rows[pid, tid] = event["args"]["name"]
                continue
            assert event["ph"] in ("X", "i"), event
            assert event["ts"] >= at, "in the order of time"
            at = event["ts"]
            assert at >= 0.0 and (pid, tid) in self.rows and pid in self.processes
            if event["ph"] == "i":
                self.marks.append(event)
            else:
                assert event["dur"] >= 0.0
                self.spans.append(event)

    def of(self, process: str, row: str = "") -> list[Event]:
        """The spans of one process, of all rows whose names begin so."""
        return [
            span
            for span in self.spans
            if self.processes[span["pid"]] == process
            and self.rows[span["pid"], span["tid"]].startswith(row)
        ]

    def names(self, process: str, row: str = "") -> set[str]:
        return {span["name"] for span in self.of(process, row)}

    def steps(self, process: str) -> list[int]:
        """The steps of a worker, in order."""
        spans = self.of(process, "training")
        return [s["args"]["step"] for s in spans if s["name"].startswith("step ")]


def _check_nesting(spans: list[Event]) -> None:
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for span in spans:
        around = rows[span["pid"], span["tid"]]
        start, end = _ns(span["ts"]), _ns(span["ts"] + span["dur"])
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1], f"{span} ends behind the one around it"
        around.append(end)


def _ns(us: float) -> int:
    return round(us * 1000)
