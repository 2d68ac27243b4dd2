"""trace.json: the spans that processes have sent, written when the job is over.

The file is written however the job ended. A process that was killed has sent what it recorded until
a second before; the file and the closing line say what is missing. The file appears complete or not
at all.

A process is a group of rows (pid: its rank), a row is a thread (tid). Spans in a row must nest;
spans of parallel operations that overlap get further rows. Two things are added here, where all
spans are known:

    compute   time of a worker's step outside of all spans
    for       which process a wait was for: in an all-reduce, the process whose bucket was ready
              last; at a barrier, the process that arrived last

Times are whole nanoseconds while they are compared, and microseconds in the file.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import UNSET

from paceline.errors import ConfigError
from paceline.observe.telemetry.events import ProgressReport
from paceline.observe.telemetry.file_formats import (
    PROCESS_NAME,
    TRACE_COMPLETE,
    TRACE_FILE,
    TRACE_INSTANT,
    TraceEvent,
    encode_trace,
    meta,
)
from paceline.observe.telemetry.trace import (
    ASYNC,
    INSTANT,
    MAX_SPANS,
    TRAINING,
    Arg,
    Spans,
    TracedSteps,
)
from paceline.runtime.process_names import ProcessName, names

_SMALLEST_GAP_NS = 20_000  # between two spans of a step: shorter gaps are not computation
_SMALLEST_WAIT_NS = 2_000  # shorter waits are noise
_COLLECTIVE = "all_reduce"
_BARRIER = "barrier"  # data_parallel/update/step.py


@dataclass
class AlignedSpan:
    """A span on the job's clock."""

    name: str
    row: str
    start_ns: int
    end_ns: int
    step: int
    kind: str
    args: dict[str, Arg] = field(default_factory=dict)


@dataclass
class ProcessTrace:
    """The recorded spans of one process."""

    rank: int
    name: str
    part: str = ""
    spans: list[AlignedSpan] = field(default_factory=list)

    def add(self, message: Spans) -> None:
        """Add the spans of a message."""
        self.part = message.part or self.part
        for span in message.spans:
            start_ns = round((span.start_s + message.offset_s) * 1e9)
            end_ns = start_ns + max(0, round(span.took_s * 1e9))
            is_short = end_ns - start_ns < _SMALLEST_WAIT_NS
            if not (is_short and span.name == "wait" and "behind" not in span.args):
                self.spans.append(
                    AlignedSpan(
                        span.name, span.row, start_ns, end_ns, span.step, span.kind, {**span.args}
                    )
                )

    @property
    def steps(self) -> set[int]:
        """The steps that it has finished."""
        return {bar.step for bar in self.spans if bar.name == f"step {bar.step}"}


def events_of(tracks: Sequence[ProcessTrace]) -> list[TraceEvent]:
    """Return all events in order of time, after the names of processes and rows."""
    attribute_waits(tracks)
    names: list[TraceEvent] = []
    bars: list[tuple[int, int, TraceEvent]] = []
    begin_ns = min((bar.start_ns for track in tracks for bar in track.spans), default=0)
    for track in sorted(tracks, key=lambda track: track.rank):
        names.append(meta(PROCESS_NAME, track.rank, name=track.name))
        names.append(meta("process_sort_index", track.rank, sort_index=track.rank))
        for tid, (row, lane) in enumerate(rows_of(track.spans)):
            names.append(meta("thread_name", track.rank, tid, name=row))
            names.append(meta("thread_sort_index", track.rank, tid, sort_index=tid))
            for bar in lane:
                event = _event(bar, track.rank, tid, begin_ns)
                bars.append((bar.start_ns, bar.start_ns - bar.end_ns, event))
    bars.sort(key=lambda one: one[:2])  # of spans that begin together, the longest first
    return names + [event for _, _, event in bars]


def _event(bar: AlignedSpan, pid: int, tid: int, begin_ns: int) -> TraceEvent:
    is_instant = bar.kind == INSTANT
    return TraceEvent(
        ph=TRACE_INSTANT if is_instant else TRACE_COMPLETE,
        name=bar.name,
        cat=bar.name.split(" ")[0],
        pid=pid,
        tid=tid,
        ts=(bar.start_ns - begin_ns) / 1000,
        dur=UNSET if is_instant else (bar.end_ns - bar.start_ns) / 1000,
        s="t" if is_instant else UNSET,
        args={"step": bar.step, **bar.args},
    )


# -- rows -------------------------------------------------------------------------------------


def rows_of(bars: Iterable[AlignedSpan]) -> Iterator[tuple[str, list[AlignedSpan]]]:
    """Yield the rows of a process: the training thread, other threads, parallel operations."""
    threads: dict[str, list[AlignedSpan]] = defaultdict(list)
    beside: dict[str, list[AlignedSpan]] = defaultdict(list)
    for bar in bars:
        (beside if bar.kind == ASYNC else threads)[bar.row].append(bar)
    if TRAINING in threads:
        threads[TRAINING] += compute_spans(threads[TRAINING])
    for row in sorted(threads, key=lambda row: (row != TRAINING, row)):
        yield row, nested(threads[row])
    for row in sorted(beside):
        for number, lane in enumerate(lanes(beside[row])):
            yield f"{row} {number + 1}" if number else row, lane


def compute_spans(bars: Sequence[AlignedSpan]) -> list[AlignedSpan]:
    """Return the gaps of each step between its spans."""
    steps, busy = list[AlignedSpan](), defaultdict[int, list[tuple[int, int]]](list)
    for bar in bars:
        if bar.name == f"step {bar.step}":
            steps.append(bar)
        elif bar.kind != INSTANT:
            busy[bar.step].append((bar.start_ns, bar.end_ns))
    found: list[AlignedSpan] = []
    for step in steps:
        at_ns = step.start_ns
        for start_ns, end_ns in [*sorted(busy[step.step]), (step.end_ns, step.end_ns)]:
            if start_ns - at_ns >= _SMALLEST_GAP_NS:
                found.append(AlignedSpan("compute", TRAINING, at_ns, start_ns, step.step, ""))
            at_ns = max(at_ns, end_ns)
    return found


def nested(bars: Iterable[AlignedSpan]) -> list[AlignedSpan]:
    """Return the spans in order, shortened so that they nest: viewers require it."""
    ordered = sorted(bars, key=lambda bar: (bar.start_ns, -bar.end_ns))
    around: list[AlignedSpan] = []
    for bar in ordered:
        while around and around[-1].end_ns <= bar.start_ns:
            around.pop()
        if around:
            bar.end_ns = min(bar.end_ns, around[-1].end_ns)
        if bar.kind != INSTANT:
            around.append(bar)
    return ordered


def lanes(bars: Iterable[AlignedSpan]) -> list[list[AlignedSpan]]:
    """Distribute overlapping spans over lanes; spans of a lane do not overlap."""
    found: list[list[AlignedSpan]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start_ns, bar.end_ns)):
        lane = next((lane for lane in found if lane[-1].end_ns <= bar.start_ns), None)
        if lane is None:
            found.append([bar])
        else:
            lane.append(bar)
    return found


# -- which process a wait was for ------------------------------------------------------------


def attribute_waits(tracks: Sequence[ProcessTrace]) -> None:
    """Add to each all-reduce which process was last, and to each wait which process it was for."""
    begun: dict[tuple[str, int, str], list[tuple[int, ProcessTrace, AlignedSpan]]] = defaultdict(
        list
    )
    for track in tracks:
        for bar in track.spans:
            if bar.row == _COLLECTIVE and bar.kind == ASYNC:
                key = (track.part, bar.step, bar.name)
                begun[key].append((bar.start_ns, track, bar))
    last: dict[
        tuple[str, int], tuple[int, ProcessTrace]
    ] = {}  # of each step: the process that was last
    for (part, step, _), those in begun.items():
        at_ns, latest, _ = max(those, key=lambda one: one[0])
        for _, _, bar in those:
            bar.args["last"] = latest.name
        if (part, step) not in last or last[part, step][0] < at_ns:
            last[part, step] = (at_ns, latest)
    arrived: dict[tuple[str, int, int], list[tuple[int, ProcessTrace, AlignedSpan]]] = defaultdict(
        list
    )
    for track in tracks:
        barriers: dict[int, int] = defaultdict(int)  # of each step, so far
        for bar in track.spans:
            behind = bar.args.get("behind") if bar.name == "wait" else None
            if behind == _COLLECTIVE:
                _attribute_wait(track, bar, last)
            elif behind == _BARRIER:
                arrived[track.part, bar.step, barriers[bar.step]].append((bar.start_ns, track, bar))
                barriers[bar.step] += 1
    for those in arrived.values():
        at_ns, latest, _ = max(those, key=lambda one: one[0])
        for _, track, bar in those:
            _attribute_wait(track, bar, {(track.part, bar.step): (at_ns, latest)})


def _attribute_wait(
    track: ProcessTrace, bar: AlignedSpan, last: Mapping[tuple[str, int], tuple[int, ProcessTrace]]
) -> None:
    at_ns, latest = last.get((track.part, bar.step), (0, track))
    is_there_first = latest is not track and at_ns > bar.start_ns
    bar.args["for"] = latest.name if is_there_first else "the transfer"


_VIEWERS = "open in https://ui.perfetto.dev or chrome://tracing"


def require_directory(steps: TracedSteps | None, directory: Path | None) -> None:
    """Raise ConfigError for a trace without a directory, before anything is started."""
    if steps is not None and directory is None:
        raise ConfigError(
            f"--trace {steps} with --log-dir none: there is no directory for {TRACE_FILE}; leave"
            " out --log-dir (and PACELINE_LOG_DIR), or name a directory"
        )


class TraceFile:
    """Collects the spans of one job. Main thread only."""

    def __init__(self, steps: TracedSteps) -> None:
        self.steps = steps
        self._messages: dict[int, list[Spans]] = {}  # by rank
        self._last_step = 0  # of any worker

    @property
    def has_spans(self) -> bool:
        """Whether any process has sent spans."""
        return bool(self._messages)

    def on_event(self, event: object) -> None:
        """Keep recorded spans, and the last step of the workers."""
        if isinstance(event, Spans):
            self._messages.setdefault(event.rank, []).append(event)
        elif isinstance(event, ProgressReport):
            known = max((step.step for step in event.steps), default=0)
            counted = event.traffic.steps if event.traffic is not None else 0
            self._last_step = max(self._last_step, known, counted)

    def write(self, directory: Path | None, process_names: Mapping[int, ProcessName]) -> str:
        """Write the file if there are spans; return a line for the user."""
        tracks = self._tracks(process_names)
        done = sorted({step for track in tracks for step in track.steps})
        if not done:
            return self._why_empty()
        began = [name for name in process_names.values() if name.is_worker and not name.is_newcomer]
        missing = [name for name in began if name.rank not in self._messages]
        cut = [t.name for t in tracks if any(message.is_cut for message in self._messages[t.rank])]
        facts = {
            "steps": f"{done[0]} to {done[-1]}",
            "asked for": str(self.steps),
            "nothing from": names(missing),
            "stopped recording at its limit": ", ".join(cut),
        }
        content = encode_trace(
            events_of(tracks), {name: value for name, value in facts.items() if value}
        )
        if directory is None:
            return "the trace was not written: the run has no directory"
        try:
            path = _write_atomically(directory, content)
        except OSError as error:
            return f"the trace could not be written to {directory}: {error.strerror or error}"
        return self._line(done, tracks, process_names, missing, cut, path)

    def _tracks(self, process_names: Mapping[int, ProcessName]) -> list[ProcessTrace]:
        tracks = []
        for rank, messages in sorted(self._messages.items()):
            tracks.append(ProcessTrace(rank, _name_of(rank, process_names)))
            for message in messages:
                tracks[-1].add(message)
        return tracks

    def _why_empty(self) -> str:
        if not self._last_step:
            return (
                f"no trace of {self.steps.text}: no step was counted (pl.distribute counts steps)"
            )
        if self._last_step < self.steps.first:
            return f"no trace of {self.steps.text}: training ended at step {self._last_step}"
        return f"no trace of {self.steps.text}: no worker sent its spans"

    def _line(
        self,
        done: list[int],
        tracks: Iterable[ProcessTrace],
        process_names: Mapping[int, ProcessName],
        missing: list[ProcessName],
        cut: list[str],
        path: Path,
    ) -> str:
        known = [process_names[track.rank] for track in tracks if track.rank in process_names]
        workers = sum(name.is_worker for name in known)
        servers = sum(name.is_server for name in known)
        parts = [TracedSteps(done[0], done[-1] + 1).text, _count(workers, "rank")]
        parts += [_count(servers, "server")] if servers else []
        line = f"trace of {', '.join(parts)}: {path} ({_VIEWERS})"
        if done[-1] + 1 < self.steps.stop and not cut:
            line += f"; training ended before the end of {self.steps.text}"
        if missing:
            line += f"; nothing from {names(missing)}"
        if cut:
            line += f"; {', '.join(cut)} stopped recording at {MAX_SPANS} spans"
        return line


def _name_of(rank: int, process_names: Mapping[int, ProcessName]) -> str:
    name = process_names.get(rank)
    if name is None:
        return f"rank {rank}"
    # A replacement has the number of a process that is gone.
    return f"{name} (process {rank})" if name.is_newcomer else str(name)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _write_atomically(directory: Path, data: bytes) -> Path:
    path, draft = directory / TRACE_FILE, directory / f".{TRACE_FILE}.{os.getpid()}"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return path
