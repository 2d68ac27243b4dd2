"""Curves over the whole length of a run, and its timeline, for the page.

Memory is bounded: a run of a week with hundreds of workers needs as much as its plots show.
`sanitize` limits the numbers of an event to a range that can be drawn, so later code need not
handle infinities or the contents of a damaged file.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from paceline.observe.report.canvas import clamp_count, clamp_seconds, finite_or_none
from paceline.observe.report.series import Curve, Rate, TypicalStep
from paceline.observe.telemetry.events import (
    COMM_SHARE,
    COMPUTE_SHARE,
    DONE_SHARE,
    BackupCaughtUp,
    CoordinatorRestarted,
    EpochEnded,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Note,
    PartitionsMoved,
    ProgressReport,
    Promoted,
    Recorded,
    Resumed,
    RunEnded,
    RunStarted,
    ServerLoad,
)
from paceline.observe.telemetry.run_state import RunState
from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.observe.telemetry.step_times import StepTimes
from paceline.runtime.formatting import duration, short_number

# Kinds and their labels, in the order of their rows in the plot.
KINDS = {
    "lost": "lost",
    "joined": "joined",
    "resumed": "resumed",
    "servers": "servers",
    "epoch": "epoch",
    "note": "note",
}


@dataclass(frozen=True)
class TimelineEntry:
    """One entry of the timeline. `text` is untrusted: not escaped yet."""

    t: float
    kind: str  # a key of KINDS
    text: str


def timeline_entry(t: float, event: Recorded) -> TimelineEntry | None:
    """Return the entry for an event; None if it has no place in the timeline."""
    match event:
        case MemberLost():
            return TimelineEntry(t, "lost", f"{_member(event)} was lost: {event.why}")
        case MemberJoined():
            return TimelineEntry(t, "joined", f"{_member(event)} joined")
        case MemberLeft():
            return TimelineEntry(t, "note", f"{_member(event)} left")
        case Resumed():
            return TimelineEntry(t, "resumed", _resumed(event))
        case EpochEnded():
            return TimelineEntry(t, "epoch", _epoch(event))
        case Promoted() | PartitionsMoved() | BackupCaughtUp():
            return TimelineEntry(t, "servers", _servers(event))
        case CoordinatorRestarted():
            return TimelineEntry(t, "servers", "the coordinator was restarted")
        case Note():
            rank = f"rank {event.rank}"
            text = event.text if event.text.startswith(rank) else f"{rank}: {event.text}"
            return TimelineEntry(t, "note", text)
        case _:
            return None


def _member(event: MemberLost | MemberJoined | MemberLeft) -> str:
    return f"{event.role} {event.number} (rank {event.rank}, {event.where})"


def _resumed(event: Resumed) -> str:
    workers = (
        "1 worker resumes" if event.num_workers == 1 else f"{event.num_workers} workers resume"
    )
    text = f"{workers} at step {event.step} after {duration(clamp_seconds(event.took_s))}"
    if event.lost:
        ranks = ", ".join(str(rank) for rank in event.lost[:8])
        text += f", without rank {ranks}{', ...' if len(event.lost) > 8 else ''}"
    return text + ("; its exchange was repeated" if event.repeats else "")


def _epoch(event: EpochEnded) -> str:
    worker = "" if event.worker is None else f" on worker {event.worker}"
    text = f"epoch {event.epoch} of {event.loader} ended{worker}: {_count(event.samples)} samples"
    counts = {
        "handed out again": event.reissued,
        "padded": event.padded,
        "dropped": event.dropped,
        "repeated": event.repeated,
    }
    return text + "".join(f", {_count(n)} {what}" for what, n in counts.items() if n)


def _count(value: int) -> str:
    number = finite_or_none(value)
    return "very many" if number is None else short_number(number)


def _servers(event: Promoted | PartitionsMoved | BackupCaughtUp) -> str:
    parts = ", ".join(str(one) for one in event.partitions[:8])
    parts += ", ..." if len(event.partitions) > 8 else ""
    if isinstance(event, Promoted):
        return f"server {event.server} took over as primary of partitions {parts}"
    if isinstance(event, PartitionsMoved):
        return f"partitions {parts} moved from server {event.source} to server {event.target}"
    return f"server {event.server} holds full copies of partitions {parts}"


_MAX_NAMES = 16  # of values reported by scripts
_MAX_ENTRIES = 100  # at the start of the run, and as many at its end
SAMPLES, STEPS, INPUT, COMPUTE, WAIT = range(5)  # kinds of amounts in `RunHistory.rate`


class RunHistory:
    """The curves and the timeline of a run."""

    def __init__(self) -> None:
        self.typical = TypicalStep()
        self.rate = Rate(kinds=5)
        self.values: dict[str, Curve] = {}  # over time, by name
        self.over_samples: dict[str, Curve] = {}
        self.over_steps: dict[str, Curve] = {}
        self.left_out: set[str] = set()  # names of further values
        self.servers: dict[str, Curve] = {}  # load of the servers
        self.first_entries: list[TimelineEntry] = []
        self.last_entries: deque[TimelineEntry] = deque(maxlen=_MAX_ENTRIES)
        self.num_entries = 0
        self._clock_s: float | None = None  # the job's clock at t = 0

    def apply(self, t: float, event: Recorded, state: RunState) -> None:
        """Add an event that has been applied to `state`."""
        if isinstance(event, ProgressReport):
            self._on_progress(t, event, state)
        elif isinstance(event, ServerLoad):
            self._on_load(t, event)
        elif not isinstance(event, TableReport | RunEnded):
            self._on_other(t, event)

    def _on_progress(self, t: float, event: ProgressReport, state: RunState) -> None:
        process = state.process(event.rank)
        if process is None or not process.is_worker:
            return
        if event.steps:
            self._on_steps(t, process.number, event.steps)
        when_s = clamp_seconds(t - event.age_s)
        for name, given in event.values.items():
            if name in (COMPUTE_SHARE, COMM_SHARE, DONE_SHARE):
                continue  # the times of steps are more exact
            value = finite_or_none(given)
            if name not in self.values:
                if len(self.values) >= _MAX_NAMES and not is_loss(name):
                    self.left_out.add(name[:256])
                    continue
                self.values[name] = Curve(1e-3)
            self.values[name].add(process.number, when_s, value)
            if is_loss(name):
                by_samples = self.over_samples.setdefault(name, Curve(1.0))
                by_samples.add(process.number, float(clamp_count(state.samples)), value)
                by_steps = self.over_steps.setdefault(name, Curve(1.0))
                by_steps.add(process.number, float(event.step), value)

    def _on_steps(self, t: float, worker: int, steps: tuple[StepTimes, ...]) -> None:
        if self._clock_s is None:
            self._clock_s = steps[-1].end_s - t
        for step in steps:
            self.typical.add(worker, step)
            end_s = clamp_seconds(step.end_s - self._clock_s)
            amounts = (step.samples, 1, step.input_s, step.compute_s, step.wait_s)
            self.rate.spread(clamp_seconds(end_s - step.took_s), end_s, amounts)

    def _on_load(self, t: float, event: ServerLoad) -> None:
        loads = {
            "busy": 100 * event.busy,
            "queued": event.queued,
            "requests_s": event.requests_s,
            "bytes_s": event.bytes_s / 1e6,
        }
        for name, value in loads.items():
            curve = self.servers.setdefault(name, Curve(1e-3))
            curve.add(event.server, t, finite_or_none(value))

    def _on_other(self, t: float, event: Recorded) -> None:
        if isinstance(event, RunStarted):
            self._clock_s = finite_or_none(event.clock_s) or None
        one = timeline_entry(t, event)
        if one is None:
            return
        self.num_entries += 1
        if len(self.first_entries) < _MAX_ENTRIES:
            self.first_entries.append(one)
        else:
            self.last_entries.append(one)


def is_loss(name: str) -> bool:
    """Return whether a reported value is a loss, by its name."""
    return "loss" in name[:256].lower()


def main_loss(curves: dict[str, Curve]) -> str | None:
    """Return the name of the main loss: "loss" itself, else the first that contains it."""
    losses = [name for name in curves if is_loss(name)]
    exact = [name for name in losses if name.lower() == "loss"]
    return next(iter(exact or losses), None)


def sanitize(event: Recorded) -> Recorded:
    """Return an event whose numbers can be drawn; nearly all events are returned unchanged."""
    match event:
        case ProgressReport():
            steps = tuple(map(_sanitize_step, event.steps))
            age_s, step = clamp_seconds(event.age_s), clamp_count(event.step)
            if steps != event.steps or (age_s, step) != (event.age_s, event.step):
                return msgspec.structs.replace(event, step=step, age_s=age_s, steps=steps)
        case TableReport():
            workers = tuple(map(_sanitize_worker, event.workers))
            return TableReport(event.table, event.server, clamp_count(event.version), workers)
        case RunEnded():
            return msgspec.structs.replace(event, wall_s=clamp_seconds(event.wall_s))
        case RunStarted():
            counts = [clamp_count(n) for n in (event.workers, event.servers, event.data_workers)]
            return msgspec.structs.replace(
                event, workers=counts[0], servers=counts[1], data_workers=counts[2]
            )
    return event


def _sanitize_step(step: StepTimes) -> StepTimes:
    is_sane = 0 <= step.wait_s <= step.took_s < 1e6 and abs(step.end_s) < 1e9
    if is_sane and 0 <= step.input_s <= step.took_s - step.wait_s and 0 <= step.samples < 1 << 40:
        return step  # the usual case; a comparison with NaN is false
    took_s = clamp_seconds(step.took_s)
    wait_s = min(clamp_seconds(step.wait_s), took_s)
    return StepTimes(
        step.step,
        finite_or_none(step.end_s) or 0.0,
        took_s,
        min(clamp_seconds(step.input_s), took_s - wait_s),
        wait_s,
        clamp_count(step.samples),
    )


def _sanitize_worker(one: WorkerReport) -> WorkerReport:
    return WorkerReport(
        one.worker,
        clamp_count(one.updates),
        {clamp_count(age): clamp_count(count) for age, count in one.staleness.items()},
        {other: clamp_seconds(time_s) for other, time_s in one.waited_s.items()},
        clamp_count(one.dropped),
        clamp_count(one.skipped),
        clamp_count(one.overwritten),
    )
