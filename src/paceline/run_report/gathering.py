"""What the lines of a run come to: sums, lines and samples, gathered in one pass.

Everything here is bounded: a run of a week with hundreds of workers needs as much memory as its
plots show. Numbers are brought into a range that can be drawn on their way in (`words.py`), so
nobody behind this has to think of infinities, or of what a foreign file may hold.
"""

from __future__ import annotations

from collections import deque

from paceline.run_report.happenings import Happened, happened
from paceline.run_report.series import Curve, Rate
from paceline.run_report.typical import TypicalStep
from paceline.run_report.words import count_of, seconds_of, usable
from paceline.telemetry.events import (
    COMM_SHARE,
    COMPUTE_SHARE,
    DONE_SHARE,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Progress,
    ServerLoad,
)
from paceline.telemetry.record import Line, RunEnded, RunStarted
from paceline.telemetry.staleness import TableReport, WorkerReport
from paceline.telemetry.steps import StepTimes, Waits

_MAX_NAMES = 16  # values that scripts report
_MAX_TABLES = 64
_MAX_HAPPENINGS = 100  # at the beginning of the run, and as many at its end
SAMPLES, STEPS, INPUT, COMPUTE, WAIT = range(5)  # kinds of amounts in `Gathered.rate`


class Gathered:
    """A run as its page shows it. Feed it with all lines, in their order."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None
        self.num_lines = 0
        self.last_s = 0.0
        self.waits = Waits()
        self.typical = TypicalStep()
        self.rate = Rate(kinds=5)
        self.samples = self.steps = 0  # of all workers
        self.values: dict[str, Curve] = {}  # over time, by name
        self.over_samples: dict[str, Curve] = {}
        self.over_steps: dict[str, Curve] = {}
        self.left_out: set[str] = set()  # names of values beyond those that are kept
        self.servers: dict[str, Curve] = {}  # what servers tell about their load
        self.tables: dict[tuple[str, int], TableReport] = {}
        self.first_happenings: list[Happened] = []
        self.last_happenings: deque[Happened] = deque(maxlen=_MAX_HAPPENINGS)
        self.num_happenings = 0
        self._number_of: dict[int, int] = {}  # a worker's, by its rank, where they differ
        self._present: set[int] = set()  # ranks of workers that report
        self._clock_s: float | None = None  # the job's clock at t = 0

    @property
    def num_workers(self) -> int:
        """How many workers were there at the start, or told something since."""
        named = self.started.workers if self.started else 0
        return max(min(named, 1 << 20), len(self.waits.workers))

    @property
    def wall_s(self) -> float:
        """How long the run took, or has taken as far as is known."""
        return max(self.last_s, seconds_of(self.ended.wall_s) if self.ended else 0.0)

    def add(self, line: Line) -> None:
        """Take in a line."""
        t, event = seconds_of(line.t), line.event
        self.num_lines += 1
        self.last_s = max(self.last_s, t)
        if isinstance(event, Progress):
            self._on_progress(t, event)
        elif isinstance(event, ServerLoad):
            self._on_load(t, event)
        elif isinstance(event, TableReport):
            if (event.table, event.server) in self.tables or len(self.tables) < _MAX_TABLES:
                self.tables[event.table, event.server] = _drawable(event)
        elif isinstance(event, RunStarted):
            self.started = event
            self._clock_s = usable(event.clock_s) or None
        elif isinstance(event, RunEnded):
            self.ended = event
        else:
            if isinstance(event, MemberJoined | MemberLost | MemberLeft) and event.role == "worker":
                self._on_member(event)
            self._keep(happened(t, event))

    def _on_member(self, event: MemberJoined | MemberLost | MemberLeft) -> None:
        if isinstance(event, MemberJoined):
            self._number_of[event.rank] = event.number
        else:
            self._present.discard(event.rank)

    def _keep(self, one: Happened | None) -> None:
        if one is None:
            return
        self.num_happenings += 1
        if len(self.first_happenings) < _MAX_HAPPENINGS:
            self.first_happenings.append(one)
        else:
            self.last_happenings.append(one)

    def _on_progress(self, t: float, event: Progress) -> None:
        worker = self._number_of.get(event.rank, event.rank)
        self._present.add(event.rank)
        if event.steps:
            self._on_steps(t, worker, [_sane(step) for step in event.steps])
        when_s = seconds_of(t - seconds_of(event.age_s))
        for name, given in event.values.items():
            if name in (COMPUTE_SHARE, COMM_SHARE, DONE_SHARE):
                continue  # steps and their times say that more exactly
            value = usable(given)
            if name not in self.values:
                if len(self.values) >= _MAX_NAMES and not is_loss(name):
                    self.left_out.add(name[:256])
                    continue
                self.values[name] = Curve(1e-3)
            self.values[name].add(worker, when_s, value)
            if is_loss(name):
                by_samples = self.over_samples.setdefault(name, Curve(1.0))
                by_samples.add(worker, float(self.samples), value)
                by_steps = self.over_steps.setdefault(name, Curve(1.0))
                by_steps.add(worker, float(count_of(event.step)), value)

    def _on_steps(self, t: float, worker: int, steps: list[StepTimes]) -> None:
        if self._clock_s is None:
            self._clock_s = steps[-1].end_s - t
        self.waits.add(worker, steps, max(len(self._present), self._expected()))
        self.steps += len(steps)
        for step in steps:
            self.samples = count_of(self.samples + step.samples)
            self.typical.add(worker, step)
            end_s = seconds_of(step.end_s - self._clock_s)
            amounts = (step.samples, 1, step.input_s, step.compute_s, step.wait_s)
            self.rate.spread(seconds_of(end_s - step.took_s), end_s, amounts)

    def _expected(self) -> int:
        """Before everybody has reported, a step is open until as many as were started have."""
        named = self.started.workers if self.started else 1
        return named if len(self.waits.workers) < named else 1

    def _on_load(self, t: float, event: ServerLoad) -> None:
        told = {
            "busy": 100 * event.busy,
            "queued": event.queued,
            "requests_s": event.requests_s,
            "bytes_s": event.bytes_s / 1e6,
        }
        for name, value in told.items():
            curve = self.servers.setdefault(name, Curve(1e-3))
            curve.add(event.server, t, usable(value))


def is_loss(name: str) -> bool:
    """Tell whether a value that a script reports is what it minimizes."""
    return "loss" in name[:256].lower()


def _sane(step: StepTimes) -> StepTimes:
    is_sane = 0 <= step.wait_s <= step.took_s < 1e6 and abs(step.end_s) < 1e9
    if is_sane and 0 <= step.input_s <= step.took_s - step.wait_s and 0 <= step.samples < 1 << 40:
        return step  # as nearly all are; a comparison with NaN is false
    took_s = seconds_of(step.took_s)
    wait_s = min(seconds_of(step.wait_s), took_s)
    return StepTimes(
        step.step,
        usable(step.end_s) or 0.0,
        took_s,
        min(seconds_of(step.input_s), took_s - wait_s),
        wait_s,
        count_of(step.samples),
    )


def _drawable(report: TableReport) -> TableReport:
    workers = tuple(
        WorkerReport(
            one.worker,
            count_of(one.updates),
            {count_of(age): count_of(count) for age, count in one.staleness.items()},
            {who: seconds_of(time_s) for who, time_s in one.waited_s.items()},
            count_of(one.dropped),
            count_of(one.skipped),
            count_of(one.overwritten),
        )
        for one in report.workers
    )
    return TableReport(report.table, report.server, count_of(report.version), workers)
