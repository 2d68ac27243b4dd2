"""Spans of all processes as the events that Perfetto and chrome://tracing draw.

A process is a group of rows (pid: its rank), a row a thread (tid). In a row spans must nest; those
that went on beside a thread and overlap get further rows. Two things are seen only here, where all
spans are together:

    compute   what is left of a worker's step between its spans
    for       whom a wait was for: in an all-reduce, the one who had its bucket ready last; at a
              barrier, the one who came last

Times are whole nanoseconds while they are compared, and microseconds in the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.telemetry.trace import ASYNC, INSTANT, TRAINING, Arg, Spans

_SMALLEST_GAP_NS = 20_000  # between two spans of a step: less is no computing
_SMALLEST_WAIT_NS = 2_000  # of waiting for what was there
_COLLECTIVE = "all_reduce"
_BARRIER = "barrier"  # data_parallel/sharded.py


@dataclass
class Bar:
    """A span on the job's clock."""

    name: str
    row: str
    start_ns: int
    end_ns: int
    step: int
    kind: str
    args: dict[str, Arg] = field(default_factory=dict)


@dataclass
class Track:
    """What one process has recorded."""

    rank: int
    name: str
    part: str = ""
    bars: list[Bar] = field(default_factory=list)

    def take(self, told: Spans) -> None:
        """Add what a message tells."""
        self.part = told.part or self.part
        for span in told.spans:
            start_ns = round((span.start_s + told.offset_s) * 1e9)
            end_ns = start_ns + max(0, round(span.took_s * 1e9))
            is_short = end_ns - start_ns < _SMALLEST_WAIT_NS
            if not (is_short and span.name == "wait" and "behind" not in span.args):
                self.bars.append(
                    Bar(span.name, span.row, start_ns, end_ns, span.step, span.kind, {**span.args})
                )

    @property
    def steps(self) -> set[int]:
        """The steps that it has done."""
        return {bar.step for bar in self.bars if bar.name == f"step {bar.step}"}


def events_of(tracks: Sequence[Track]) -> list[dict[str, Any]]:
    """Return everything in the order of time, names of processes and rows first."""
    blame(tracks)
    names: list[dict[str, Any]] = []
    bars: list[tuple[int, int, dict[str, Any]]] = []
    begin_ns = min((bar.start_ns for track in tracks for bar in track.bars), default=0)
    for track in sorted(tracks, key=lambda track: track.rank):
        names.append(_meta("process_name", track.rank, name=track.name))
        names.append(_meta("process_sort_index", track.rank, sort_index=track.rank))
        for tid, (row, lane) in enumerate(rows_of(track.bars)):
            names.append(_meta("thread_name", track.rank, tid, name=row))
            names.append(_meta("thread_sort_index", track.rank, tid, sort_index=tid))
            for bar in lane:
                event = _event(bar, track.rank, tid, begin_ns)
                bars.append((bar.start_ns, bar.start_ns - bar.end_ns, event))
    bars.sort(key=lambda one: one[:2])  # of those that begin together, the longest first
    return names + [event for _, _, event in bars]


def _meta(what: str, pid: int, tid: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _event(bar: Bar, pid: int, tid: int, begin_ns: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "i" if bar.kind == INSTANT else "X",
        "name": bar.name,
        "cat": bar.name.split(" ")[0],
        "pid": pid,
        "tid": tid,
        "ts": (bar.start_ns - begin_ns) / 1000,
        "args": {"step": bar.step, **bar.args},
    }
    if bar.kind == INSTANT:
        return {**event, "s": "t"}
    return {**event, "dur": (bar.end_ns - bar.start_ns) / 1000}


# -- rows -------------------------------------------------------------------------------------


def rows_of(bars: Iterable[Bar]) -> Iterator[tuple[str, list[Bar]]]:
    """Yield the rows of a process: of threads, the one that trains first, then what was beside."""
    threads: dict[str, list[Bar]] = defaultdict(list)
    beside: dict[str, list[Bar]] = defaultdict(list)
    for bar in bars:
        (beside if bar.kind == ASYNC else threads)[bar.row].append(bar)
    if TRAINING in threads:
        threads[TRAINING] += computing(threads[TRAINING])
    for row in sorted(threads, key=lambda row: (row != TRAINING, row)):
        yield row, nested(threads[row])
    for row in sorted(beside):
        for number, lane in enumerate(lanes(beside[row])):
            yield f"{row} {number + 1}" if number else row, lane


def computing(bars: Sequence[Bar]) -> list[Bar]:
    """Return what is left of each step between its spans."""
    steps, busy = list[Bar](), defaultdict[int, list[tuple[int, int]]](list)
    for bar in bars:
        if bar.name == f"step {bar.step}":
            steps.append(bar)
        elif bar.kind != INSTANT:
            busy[bar.step].append((bar.start_ns, bar.end_ns))
    found: list[Bar] = []
    for step in steps:
        at_ns = step.start_ns
        for start_ns, end_ns in [*sorted(busy[step.step]), (step.end_ns, step.end_ns)]:
            if start_ns - at_ns >= _SMALLEST_GAP_NS:
                found.append(Bar("compute", TRAINING, at_ns, start_ns, step.step, ""))
            at_ns = max(at_ns, end_ns)
    return found


def nested(bars: Iterable[Bar]) -> list[Bar]:
    """Return them in order, each inside of the one around it: a viewer draws nothing else."""
    ordered = sorted(bars, key=lambda bar: (bar.start_ns, -bar.end_ns))
    around: list[Bar] = []
    for bar in ordered:
        while around and around[-1].end_ns <= bar.start_ns:
            around.pop()
        if around:
            bar.end_ns = min(bar.end_ns, around[-1].end_ns)
        if bar.kind != INSTANT:
            around.append(bar)
    return ordered


def lanes(bars: Iterable[Bar]) -> list[list[Bar]]:
    """Share out spans that overlap: in a lane they come one after the other."""
    found: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start_ns, bar.end_ns)):
        lane = next((lane for lane in found if lane[-1].end_ns <= bar.start_ns), None)
        if lane is None:
            found.append([bar])
        else:
            lane.append(bar)
    return found


# -- whom a wait was for ----------------------------------------------------------------------


def blame(tracks: Sequence[Track]) -> None:
    """Write into all-reduces who came last, and into the waits behind them for whom they were."""
    begun: dict[tuple[str, int, str], list[tuple[int, Track, Bar]]] = defaultdict(list)
    for track in tracks:
        for bar in track.bars:
            if bar.row == _COLLECTIVE and bar.kind == ASYNC:
                key = (track.part, bar.step, bar.name)
                begun[key].append((bar.start_ns, track, bar))
    last: dict[tuple[str, int], tuple[int, Track]] = {}  # of each step: who let the others go
    for (part, step, _), those in begun.items():
        at_ns, latest, _ = max(those, key=lambda one: one[0])
        for _, _, bar in those:
            bar.args["last"] = latest.name
        if (part, step) not in last or last[part, step][0] < at_ns:
            last[part, step] = (at_ns, latest)
    met: dict[tuple[str, int, int], list[tuple[int, Track, Bar]]] = defaultdict(list)
    for track in tracks:
        barriers: dict[int, int] = defaultdict(int)  # of each step, so far
        for bar in track.bars:
            behind = bar.args.get("behind") if bar.name == "wait" else None
            if behind == _COLLECTIVE:
                _name_culprit(track, bar, last)
            elif behind == _BARRIER:
                met[track.part, bar.step, barriers[bar.step]].append((bar.start_ns, track, bar))
                barriers[bar.step] += 1
    for those in met.values():
        at_ns, latest, _ = max(those, key=lambda one: one[0])
        for _, track, bar in those:
            _name_culprit(track, bar, {(track.part, bar.step): (at_ns, latest)})


def _name_culprit(
    track: Track, bar: Bar, last: Mapping[tuple[str, int], tuple[int, Track]]
) -> None:
    at_ns, latest = last.get((track.part, bar.step), (0, track))
    is_there_first = latest is not track and at_ns > bar.start_ns
    bar.args["for"] = latest.name if is_there_first else "the transfer"
