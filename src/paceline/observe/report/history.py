"""What the page shows beside the state of a run: curves over its whole length, and what happened.

Everything here is bounded: a run of a week with hundreds of workers needs as much memory as its
plots show. `drawable` brings numbers into a range that can be drawn on their way in, so nobody
after it has to think of infinities, or of what a foreign file may hold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from paceline.observe.report.canvas import count_of, seconds_of, usable
from paceline.observe.report.series import Curve, Rate, TypicalStep
from paceline.observe.telemetry.event_file import Recorded, RunEnded, RunStarted
from paceline.observe.telemetry.events import (
    COMM_SHARE,
    COMPUTE_SHARE,
    DONE_SHARE,
    CoordinatorBack,
    EpochEnded,
    Filled,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Moved,
    Note,
    Progress,
    Promoted,
    Resumed,
    ServerLoad,
)
from paceline.observe.telemetry.run_state import Process, RunState
from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.observe.telemetry.step_times import StepTimes
from paceline.runtime.formatting import duration, short_number

# Kinds and what people call them, in the order of their rows in the picture.
KINDS = {
    "lost": "lost",
    "joined": "joined",
    "resumed": "went on",
    "servers": "servers",
    "epoch": "epoch",
    "note": "note",
}


@dataclass(frozen=True)
class Happened:
    """One thing that happened. `text` is foreign in parts: not escaped yet."""

    t: float
    kind: str  # a key of KINDS
    text: str


def happened(t: float, event: Recorded) -> Happened | None:
    """Say what an event tells; None where it is nothing that people ask about."""
    match event:
        case MemberLost():
            text = f"{_who(event)} was lost: {event.why}"
            return Happened(t, "lost", text)
        case MemberJoined():
            return Happened(t, "joined", f"{_who(event)} joined")
        case MemberLeft():
            return Happened(t, "note", f"{_who(event)} left")
        case Resumed():
            return Happened(t, "resumed", _resumed(event))
        case EpochEnded():
            return Happened(t, "epoch", _epoch(event))
        case Promoted() | Moved() | Filled():
            return Happened(t, "servers", _servers(event))
        case CoordinatorBack():
            return Happened(t, "servers", "the coordinator was restarted and goes on")
        case Note():
            who = f"rank {event.rank}"
            text = event.text if event.text.startswith(who) else f"{who}: {event.text}"
            return Happened(t, "note", text)
        case _:
            return None


def _who(event: MemberLost | MemberJoined | MemberLeft) -> str:
    return f"{event.role} {event.number} (rank {event.rank}, {event.where})"


def _resumed(event: Resumed) -> str:
    workers = "1 worker goes" if event.num_workers == 1 else f"{event.num_workers} workers go"
    text = f"{workers} on with step {event.step} after {duration(seconds_of(event.took_s))}"
    if event.lost:
        ranks = ", ".join(str(rank) for rank in event.lost[:8])
        text += f", without rank {ranks}{', ...' if len(event.lost) > 8 else ''}"
    return text + ("; its exchange was done again" if event.repeats else "")


def _epoch(event: EpochEnded) -> str:
    whose = "" if event.worker is None else f" of worker {event.worker}"
    text = f"epoch {event.epoch} of {event.loader} ended{whose}: {_count(event.samples)} samples"
    counts = {
        "handed out again": event.reissued,
        "padded": event.padded,
        "dropped": event.dropped,
        "repeated": event.repeated,
    }
    return text + "".join(f", {_count(n)} {what}" for what, n in counts.items() if n)


def _count(value: int) -> str:
    drawable = usable(value)
    return "very many" if drawable is None else short_number(drawable)


def _servers(event: Promoted | Moved | Filled) -> str:
    parts = ", ".join(str(one) for one in event.partitions[:8])
    parts += ", ..." if len(event.partitions) > 8 else ""
    if isinstance(event, Promoted):
        return f"server {event.server} took over as primary of partitions {parts}"
    if isinstance(event, Moved):
        return f"partitions {parts} moved from server {event.source} to server {event.target}"
    return f"server {event.server} holds full copies of partitions {parts}"


_MAX_NAMES = 16  # values that scripts report
_MAX_HAPPENINGS = 100  # at the beginning of the run, and as many at its end
SAMPLES, STEPS, INPUT, COMPUTE, WAIT = range(5)  # kinds of amounts in `RunHistory.rate`


class RunHistory:
    """The curves of a run; a `RunState` feeds it."""

    def __init__(self) -> None:
        self.typical = TypicalStep()
        self.rate = Rate(kinds=5)
        self.values: dict[str, Curve] = {}  # over time, by name
        self.over_samples: dict[str, Curve] = {}
        self.over_steps: dict[str, Curve] = {}
        self.left_out: set[str] = set()  # names of values beyond those that are kept
        self.servers: dict[str, Curve] = {}  # what servers tell about their load
        self.first_happenings: list[Happened] = []
        self.last_happenings: deque[Happened] = deque(maxlen=_MAX_HAPPENINGS)
        self.num_happenings = 0
        self._clock_s: float | None = None  # the job's clock at t = 0

    def on_progress(self, t: float, process: Process, event: Progress, state: RunState) -> None:
        """Add the steps and values of a worker to the curves."""
        if not process.is_worker:
            return
        if event.steps:
            self._on_steps(t, process.number, event.steps)
        when_s = seconds_of(t - event.age_s)
        for name, given in event.values.items():
            if name in (COMPUTE_SHARE, COMM_SHARE, DONE_SHARE):
                continue  # steps and their times say that more exactly
            value = usable(given)
            if name not in self.values:
                if len(self.values) >= _MAX_NAMES and not is_loss(name):
                    self.left_out.add(name[:256])
                    continue
                self.values[name] = Curve(1e-3)
            self.values[name].add(process.number, when_s, value)
            if is_loss(name):
                by_samples = self.over_samples.setdefault(name, Curve(1.0))
                by_samples.add(process.number, float(count_of(state.samples)), value)
                by_steps = self.over_steps.setdefault(name, Curve(1.0))
                by_steps.add(process.number, float(event.step), value)

    def _on_steps(self, t: float, worker: int, steps: tuple[StepTimes, ...]) -> None:
        if self._clock_s is None:
            self._clock_s = steps[-1].end_s - t
        for step in steps:
            self.typical.add(worker, step)
            end_s = seconds_of(step.end_s - self._clock_s)
            amounts = (step.samples, 1, step.input_s, step.compute_s, step.wait_s)
            self.rate.spread(seconds_of(end_s - step.took_s), end_s, amounts)

    def on_load(self, t: float, event: ServerLoad) -> None:
        """Add what a server had to do."""
        told = {
            "busy": 100 * event.busy,
            "queued": event.queued,
            "requests_s": event.requests_s,
            "bytes_s": event.bytes_s / 1e6,
        }
        for name, value in told.items():
            curve = self.servers.setdefault(name, Curve(1e-3))
            curve.add(event.server, t, usable(value))

    def on_other(self, t: float, event: Recorded) -> None:
        """Keep what happened, if it is something that people ask about."""
        if isinstance(event, RunStarted):
            self._clock_s = usable(event.clock_s) or None
        one = happened(t, event)
        if one is None:
            return
        self.num_happenings += 1
        if len(self.first_happenings) < _MAX_HAPPENINGS:
            self.first_happenings.append(one)
        else:
            self.last_happenings.append(one)


def is_loss(name: str) -> bool:
    """Tell whether a value that a script reports is what it minimizes."""
    return "loss" in name[:256].lower()


def drawable(event: Recorded) -> Recorded:
    """Return an event whose numbers can be drawn, as those of nearly all events can."""
    match event:
        case Progress():
            steps = tuple(map(_sane, event.steps))
            age_s, step = seconds_of(event.age_s), count_of(event.step)
            if steps != event.steps or (age_s, step) != (event.age_s, event.step):
                return msgspec.structs.replace(event, step=step, age_s=age_s, steps=steps)
        case TableReport():
            workers = tuple(map(_drawable_worker, event.workers))
            return TableReport(event.table, event.server, count_of(event.version), workers)
        case RunEnded():
            return msgspec.structs.replace(event, wall_s=seconds_of(event.wall_s))
        case RunStarted():
            counts = [count_of(n) for n in (event.workers, event.servers, event.data_workers)]
            return msgspec.structs.replace(
                event, workers=counts[0], servers=counts[1], data_workers=counts[2]
            )
    return event


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


def _drawable_worker(one: WorkerReport) -> WorkerReport:
    return WorkerReport(
        one.worker,
        count_of(one.updates),
        {count_of(age): count_of(count) for age, count in one.staleness.items()},
        {who: seconds_of(time_s) for who, time_s in one.waited_s.items()},
        count_of(one.dropped),
        count_of(one.skipped),
        count_of(one.overwritten),
    )
