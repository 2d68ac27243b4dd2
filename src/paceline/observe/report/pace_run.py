"""What one run of a comparison has reached, from the record of its directory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.observe.telemetry.events import BACKWARD_LOSS, ProgressReport, RunStarted
from paceline.observe.telemetry.file_formats import EventReader
from paceline.observe.telemetry.traffic import Traffic

BINS = 60  # of a curve
_LAST = 0.1  # share of a run at its end whose mean loss is the one that it reached


class Step(NamedTuple):
    """One step of one worker."""

    end_s: float  # since the first step of the job began
    took_s: float
    wait_s: float
    samples: int
    loss: float | None  # mean of the steps that were reported together


class Point(NamedTuple):
    """A point of the curves: means over a short stretch of the run."""

    t_s: float
    samples: float  # of all workers since the start
    loss: float
    per_s: float  # samples per second in that stretch


@dataclass
class PaceRun:
    """One pace of a comparison."""

    label: str
    command: str
    failure: str = ""
    steps: list[Step] = field(default_factory=list)  # of all workers, in the order of their ends
    sent: list[Traffic] = field(default_factory=list)  # of each worker
    num_workers: int = 1
    counts_samples: bool = True
    ended_s: float | None = None  # when the script ended by itself, before the budget

    @property
    def took_s(self) -> float:
        return self.steps[-1].end_s if self.steps else 0.0

    @property
    def samples(self) -> int:
        return sum(one.samples for one in self.steps)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.took_s

    @property
    def steps_per_s(self) -> float:
        """Steps of a worker per second."""
        return len(self.steps) / self.num_workers / self.took_s

    @property
    def wait_share(self) -> float:
        return sum(one.wait_s for one in self.steps) / sum(one.took_s for one in self.steps)

    @property
    def sent_per_step(self) -> float:
        """Bytes that a worker sends in a step."""
        found = [one.per_step for one in self.sent if one.per_step is not None]
        return statistics.fmean(found) if found else 0.0

    @property
    def loss(self) -> float | None:
        """The mean loss at the end of the run."""
        first_s = (1 - _LAST) * self.took_s
        last = [one.loss for one in self.steps if one.loss is not None and one.end_s >= first_s]
        last = last or [one.loss for one in self.steps if one.loss is not None][-self.num_workers :]
        return statistics.fmean(last) if last else None

    def curve(self) -> list[Point]:
        """Return the course of the run, in at most BINS stretches of equal length."""
        width_s = self.took_s / BINS
        bins: dict[int, list[Step]] = {}
        for one in self.steps:
            bins.setdefault(min(BINS - 1, int(one.end_s / width_s)), []).append(one)
        made, samples = [], 0
        for at, steps in sorted(bins.items()):
            samples += sum(one.samples for one in steps)
            losses = [one.loss for one in steps if one.loss is not None]
            if losses:
                per_s = sum(one.samples for one in steps) / width_s
                mean = statistics.fmean(losses)
                made.append(Point((at + 1) * width_s, samples, mean, per_s))
        return made

    def smooth(self) -> list[tuple[float, float]]:
        """Return times with the loss, smoothed over 3 stretches."""
        points = self.curve()
        return [
            (one.t_s, statistics.fmean(near.loss for near in points[max(0, at - 1) : at + 2]))
            for at, one in enumerate(points)
        ]

    def time_to(self, loss: float) -> float | None:
        """Return when the smoothed loss first was as low as that; None: never."""
        return next((t_s for t_s, found in self.smooth() if found <= loss), None)


def common_loss(runs: Sequence[PaceRun]) -> float | None:
    """Return the lowest loss that all runs have reached, at some time."""
    lowest = [
        min((loss for _, loss in one.smooth() if math.isfinite(loss)), default=math.nan)
        for one in runs
    ]
    return max((one for one in lowest if math.isfinite(one)), default=None)


def read_pace_run(
    run: PaceRun, directory: Path, *, budget_s: float | None, most_steps: int | None, value: str
) -> None:
    """Add the steps of a record that are within the budget."""
    reports = list(_reports(directory))
    began = [report.steps[0] for _, report in reports if report.steps]
    if not began:
        return
    begin_s = min(one.end_s - one.took_s for one in began)
    found, traffic, per_worker = [], dict[int, Traffic](), dict[int, int]()
    for _, report in reports:
        loss = report.values.get(value)
        for one in report.steps:
            end_s = one.end_s - begin_s
            count = per_worker[report.rank] = per_worker.get(report.rank, 0) + 1
            if (budget_s is not None and end_s > budget_s) or count > (most_steps or count):
                continue
            found.append(Step(end_s, one.took_s, one.wait_s, one.samples, loss))
            if report.traffic is not None:
                traffic[report.rank] = report.traffic
    run.steps = sorted(found)
    run.sent = list(traffic.values())
    if not run.samples:  # the script splits its data itself
        run.counts_samples = False
        run.steps = [one._replace(samples=1) for one in run.steps]


def _reports(directory: Path) -> Iterator[tuple[float, ProgressReport]]:
    workers = None
    for line in EventReader(directory / "events.jsonl").lines():
        if isinstance(line.event, RunStarted):
            workers = line.event.workers
        if isinstance(line.event, ProgressReport) and line.event.rank < (workers or 1 << 30):
            yield line.t, line.event


def known_values(directory: Path) -> list[str]:
    """Return the names of the values that a script has reported."""
    names = {name for _, report in _reports(directory) for name in report.values}
    return sorted(names - {BACKWARD_LOSS})
