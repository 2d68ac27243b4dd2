"""Reads the directory of a run: its events, configuration and trace.

Files may be truncated, written by other programs, or missing. A directory without a run raises an
error. Everything else results in a page, which says what could not be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.observe.report.canvas import clamp_seconds
from paceline.observe.report.history import RunHistory, sanitize
from paceline.observe.report.trace_lanes import StepTimeline, read_trace
from paceline.observe.telemetry.events import RunStarted
from paceline.observe.telemetry.file_formats import (
    CONFIG_FILE,
    EVENTS_FILE,
    TRACE_FILE,
    EventLine,
    EventReader,
)
from paceline.observe.telemetry.run_state import RunState

_EXPECTED = f"expected a run directory of `paceline run`, with {EVENTS_FILE} in it"
_MAX_CONFIG_BYTES = 4 << 20
_MAX_SETTINGS = 300


@dataclass(frozen=True)
class ConfigRow:
    """A row of the configuration."""

    name: str
    value: str
    origin: str


@dataclass
class Run:
    """All that is known about a run."""

    directory: Path
    settings: list[ConfigRow] = field(default_factory=list)
    trace: StepTimeline | None = None
    remarks: list[str] = field(default_factory=list)  # about unreadable files

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop everything: the lines so far are of an earlier run."""
        self.history = RunHistory()
        self.state = RunState(accepts_unknown=True)

    def add(self, line: EventLine) -> None:
        """Apply a line of the record."""
        t, event = clamp_seconds(line.t), sanitize(line.event)
        self.state.apply(t, event)
        self.history.apply(t, event, self.state)

    @property
    def wall_s(self) -> float:
        """How long the run took, or the time recorded so far."""
        return max(self.state.last_s, self.state.ended.wall_s if self.state.ended else 0.0)


def read_run(directory: Path) -> Run:
    """Read the directory of a run; raise UsageError if it is none."""
    path = _events_file(directory)
    run = Run(directory)
    reading, earlier = EventReader(path), 0
    try:
        for line in reading.lines():
            if isinstance(line.event, RunStarted) and run.state.num_events:
                run.reset()
                earlier += 1
            run.add(line)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); {_EXPECTED}") from None
    if reading.damaged and not run.state.num_events:
        raise UsageError(
            f"{path}: none of its {reading.damaged} lines is an event of a run; {_EXPECTED}: each"
            ' line as {"t": 0.0, "event": {...}}'
        )
    run.remarks += _remarks(reading.damaged, earlier, run.state.num_events)
    _read_config(run)
    _read_trace(run)
    return run


def _events_file(directory: Path) -> Path:
    if not directory.exists():
        raise UsageError(f"there is no {directory}; {_EXPECTED}")
    if not directory.is_dir():
        raise UsageError(f"{directory} is a file; {_EXPECTED}")
    path = directory / EVENTS_FILE
    if path.is_file():
        return path
    found = sorted(directory.glob(f"*/{EVENTS_FILE}"), key=lambda one: one.parent.name)
    hint = f"; did you mean {found[-1].parent}?" if found else ""
    raise UsageError(f"{directory} has no {EVENTS_FILE}; {_EXPECTED}{hint}")


def _remarks(damaged: int, earlier: int, num_lines: int) -> list[str]:
    remarks = []
    if damaged:
        lines = "1 line" if damaged == 1 else f"{damaged} lines"
        remarks.append(
            f"{lines} of {EVENTS_FILE} could not be read: truncated, or written by another version"
            " of Paceline. The page shows the rest."
        )
    if earlier:
        runs = "an earlier run" if earlier == 1 else f"{earlier} earlier runs"
        remarks.append(f"{EVENTS_FILE} also holds {runs}; the page shows the last one.")
    if not num_lines:
        remarks.append(f"{EVENTS_FILE} is empty: nothing has been recorded yet.")
    return remarks


def _read_config(run: Run) -> None:
    path = run.directory / CONFIG_FILE
    if not path.is_file():
        return
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError("it is too large")
        found = msgspec.json.decode(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:  # msgspec's and unicode's errors are ValueErrors
        run.remarks.append(f"{CONFIG_FILE} could not be read ({error}).")
        return
    run.settings = [_setting(name, entry) for name, entry in list(found.items())[:_MAX_SETTINGS]]
    if len(found) > _MAX_SETTINGS:
        run.remarks.append(f"{len(found) - _MAX_SETTINGS} more settings are in {CONFIG_FILE}.")


def _setting(name: str, entry: object) -> ConfigRow:
    if isinstance(entry, dict) and "value" in entry:
        return ConfigRow(name, _as_text(entry["value"]), _as_text(entry.get("origin", "")))
    return ConfigRow(name, _as_text(entry), "")


def _as_text(value: object) -> str:
    if value is None or value == []:
        return "none"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _read_trace(run: Run) -> None:
    path = run.directory / TRACE_FILE
    if not path.is_file():
        return
    try:
        run.trace = read_trace(path)
    except (OSError, ValueError) as error:
        run.remarks.append(f"{TRACE_FILE} could not be read ({error}).")
