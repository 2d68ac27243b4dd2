"""Runs as their directories hold them: written by hand, and the pages that are made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import msgspec

from paceline.observe.report.page import render
from paceline.observe.report.reading import Run
from paceline.observe.telemetry.events import ProgressReport, Recorded, RunEnded, RunStarted
from paceline.observe.telemetry.file_formats import EVENTS_FILE, EventLine, encode_event
from paceline.observe.telemetry.step_times import StepTimes

Timed = tuple[float, Recorded]
STARTED = RunStarted(
    "20261117-071204-train-3f2a",
    "2026-11-17T07:12:04Z",
    "paceline run -n 2 train.py",
    "train.py",
    2,
    pace="allreduce",
    version="0.1.0",
    clock_s=100.0,
)


def training(
    num_workers: int = 2, num_steps: int = 20, *, slow: int | None = 1, name: str = "loss"
) -> Iterator[Timed]:
    """Steps of 0.1 s in lockstep, of which `slow` computes nearly all and the others a half."""
    for step in range(1, num_steps + 1):
        for worker in range(num_workers):
            wait_s = 0.005 if worker == slow else 0.05
            times = StepTimes(step, 100 + 0.1 * step, 0.1, 0.01, wait_s, 32)
            values = {name: 2 * math.exp(-step / 10) + 0.01 * worker, "lr": 0.1}
            yield 0.1 * step, ProgressReport(worker, step, values, steps=(times,))


def whole(events: Iterable[Timed], num_workers: int = 2) -> list[Timed]:
    """Put a beginning and an end around events."""
    inside = list(events)
    end_s = max((t for t, _ in inside), default=0.0) + 1
    started = msgspec.structs.replace(STARTED, workers=num_workers)
    return [(0.0, started), *inside, (end_s, RunEnded(0, end_s, "2 ranks finished"))]


def write_record(directory: Path, events: Iterable[Timed], tail: bytes = b"") -> Path:
    """Write the record of a run, with some bytes behind it."""
    directory.mkdir(parents=True, exist_ok=True)
    data = b"".join(encode_event(t, event) for t, event in events)
    (directory / EVENTS_FILE).write_bytes(data + tail)
    return directory


def page_of(events: Iterable[Timed]) -> str:
    """Make the page without any file."""
    run = Run(Path("some-run"))
    for t, event in events:
        run.add(EventLine(t, event))
    return render(run)


class Parsed(HTMLParser):
    """What a browser makes of a page: its elements, their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data
