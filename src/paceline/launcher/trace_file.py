"""trace.json: the spans that processes have sent, written when the job is over.

Whatever happened to the job, the file has what there is: a process that was killed has sent what it
recorded until a second before, and what is missing is said, in the file and in the closing line.
The file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.launcher.seat import Seat, names
from paceline.launcher.trace_events import Track, events_of
from paceline.telemetry.events import Progress
from paceline.telemetry.trace import MOST_SPANS, Spans, TracedSteps

FILE = "trace.json"
_VIEWERS = "open in https://ui.perfetto.dev or chrome://tracing"


def require_directory(steps: TracedSteps | None, directory: Path | None) -> None:
    """Refuse a trace that could not be kept, before anything is started."""
    if steps is not None and directory is None:
        raise ConfigError(
            f"--trace {steps} with --log-dir none: there is no directory for {FILE}; leave out"
            " --log-dir (and PACELINE_LOG_DIR), or name a directory"
        )


class TraceFile:
    """Collects the spans of one job. Main thread only."""

    def __init__(self, steps: TracedSteps) -> None:
        self.steps = steps
        self._told: dict[int, list[Spans]] = {}  # by rank
        self._last_step = 0  # of any worker, as far as known

    @property
    def has_spans(self) -> bool:
        """Whether any process has told something."""
        return bool(self._told)

    def on_event(self, event: object) -> None:
        """Take in what a process has recorded, and how far workers are."""
        if isinstance(event, Spans):
            self._told.setdefault(event.rank, []).append(event)
        elif isinstance(event, Progress):
            known = max((step.step for step in event.steps), default=0)
            counted = event.traffic.steps if event.traffic is not None else 0
            self._last_step = max(self._last_step, known, counted)

    def write(self, directory: Path | None, seats: Mapping[int, Seat]) -> str:
        """Write the file, if there is anything to write; return a line for the person."""
        tracks = self._tracks(seats)
        done = sorted({step for track in tracks for step in track.steps})
        if not done:
            return self._nothing()
        began = [seat for seat in seats.values() if seat.is_worker and not seat.is_newcomer]
        missing = [seat for seat in began if seat.rank not in self._told]
        cut = [t.name for t in tracks if any(told.is_cut for told in self._told[t.rank])]
        said = {
            "steps": f"{done[0]} to {done[-1]}",
            "asked for": str(self.steps),
            "nothing from": names(missing),
            "stopped recording at its limit": ", ".join(cut),
        }
        content = {
            "traceEvents": events_of(tracks),
            "displayTimeUnit": "ms",
            "otherData": {name: value for name, value in said.items() if value},
        }
        if directory is None:
            return "the trace was not written: the run has no directory"
        try:
            path = _write_whole(directory, msgspec.json.encode(content))
        except OSError as error:
            return f"the trace could not be written to {directory}: {error.strerror or error}"
        return self._line(done, tracks, seats, missing, cut, path)

    def _tracks(self, seats: Mapping[int, Seat]) -> list[Track]:
        tracks = []
        for rank, told in sorted(self._told.items()):
            tracks.append(Track(rank, _name_of(rank, seats)))
            for message in told:
                tracks[-1].take(message)
        return tracks

    def _nothing(self) -> str:
        if not self._last_step:
            return f"no trace of {self.steps.words}: no step was counted (pl.distribute does that)"
        if self._last_step < self.steps.first:
            return f"no trace of {self.steps.words}: training ended at step {self._last_step}"
        return f"no trace of {self.steps.words}: no worker could tell what it recorded"

    def _line(
        self,
        done: list[int],
        tracks: Iterable[Track],
        seats: Mapping[int, Seat],
        missing: list[Seat],
        cut: list[str],
        path: Path,
    ) -> str:
        known = [seats[track.rank] for track in tracks if track.rank in seats]
        workers = sum(seat.is_worker for seat in known)
        servers = sum(seat.is_server for seat in known)
        words = [TracedSteps(done[0], done[-1] + 1).words, _count(workers, "rank")]
        words += [_count(servers, "server")] if servers else []
        line = f"trace of {', '.join(words)}: {path} ({_VIEWERS})"
        if done[-1] + 1 < self.steps.stop and not cut:
            line += f"; of {self.steps.words} no more were done"
        if missing:
            line += f"; nothing from {names(missing)}"
        if cut:
            line += f"; {', '.join(cut)} stopped recording at {MOST_SPANS} spans"
        return line


def _name_of(rank: int, seats: Mapping[int, Seat]) -> str:
    seat = seats.get(rank)
    if seat is None:
        return f"rank {rank}"
    # One that came later has the number of somebody who is gone.
    return f"{seat} (process {rank})" if seat.is_newcomer else str(seat)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _write_whole(directory: Path, data: bytes) -> Path:
    path, draft = directory / FILE, directory / f".{FILE}.{os.getpid()}"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return path
