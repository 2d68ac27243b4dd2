"""The board: the state of a run (observe/telemetry/run_state.py) as rows and lines of text.

The launcher applies events and exits to it. The display paints snapshots of it while the job runs
and once more at the end. Every worker has a row; a server gets one with its first report. A
replacement continues in the row of the process that it replaces.

While the job runs, rates and shares cover the last seconds; at the end, all steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from paceline.observe.display.lines import printable
from paceline.observe.telemetry.events import (
    CODEC_ERROR,
    COMM_SHARE,
    COMPUTE_SHARE,
    COPY_SHARE,
    DEVICE_MEMORY,
    DEVICE_TIME,
    DONE_SHARE,
    LEARNING_RATE,
    STALENESS,
    Event,
    MembershipEvent,
)
from paceline.observe.telemetry.run_state import FINISHED, RUNNING, Process, RunState
from paceline.observe.telemetry.staleness import TableReport, merge
from paceline.runtime.formatting import duration, number, rate
from paceline.runtime.process_names import ProcessName

# Columns of the script's own values; more do not fit. The shares are extra.
MAX_COLUMNS = 5
_UNNAMED = (
    COMPUTE_SHARE,
    COMM_SHARE,
    STALENESS,
    DONE_SHARE,
)  # shown in columns or lines of their own
# Shown after the values of the script.
AUTOMATIC = (LEARNING_RATE, CODEC_ERROR, DEVICE_TIME, DEVICE_MEMORY, COPY_SHARE)
_NOTEWORTHY_WAIT = 40.0  # percent of the time that other workers lose before one is named


@dataclass(frozen=True, kw_only=True)
class ProcessRow:
    """The displayed values of one process; `label` is its number, or s0, s1 ... for a server.

    Shares are in percent of the time of steps. An unknown value is None. A value that is unknown
    for all processes gets no column.
    """

    label: str
    step: int | None
    values: Mapping[str, float]
    state: str
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    input: float | None = None
    compute: float | None = None
    wait: float | None = None
    staleness: float | None = None  # of its updates, on average, in versions
    sent_per_s: float | None = None  # bytes


@dataclass(frozen=True)
class BoardSnapshot:
    """All processes at one moment. `columns` are the names of reported values, in order."""

    columns: tuple[str, ...]
    rows: Sequence[ProcessRow]
    line: str  # the same in one line
    remarks: tuple[str, ...] = ()  # what the table does not show, the most important first


class Board:
    """Rows and lines about a run. Not thread-safe: used on the launcher's main thread."""

    def __init__(self, process_names: Sequence[ProcessName]) -> None:
        self.state = RunState()
        for name in process_names:
            self.add(name)
        # Mean staleness by worker, and the number of table reports that it was computed from.
        self._staleness: tuple[int, dict[int, float]] = (0, {})

    def add(self, name: ProcessName) -> None:
        """Add a row, or reuse the row of the process's predecessor."""
        self.state.add_process(name.rank, name.role, name.number)

    def remove(self, name: ProcessName) -> None:
        """Remove a row: its process was released and has left."""
        self.state.remove(name.rank)

    def set_state(self, rank: int, state: str) -> None:
        """Set the state of a rank, in a few words."""
        self.state.set_state(rank, state)

    def on_event(self, event: Event | MembershipEvent, now_s: float) -> None:
        """Apply an event."""
        self.state.apply(now_s, event)

    @property
    def has_progress(self) -> bool:
        """Whether any process has reported something."""
        return self.state.has_progress

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the displayed values, in the order of first appearance."""
        names = dict.fromkeys(_shown(name) for name in self.state.names if name not in _UNNAMED)
        return tuple(sorted(list(names)[:MAX_COLUMNS], key=lambda name: name in AUTOMATIC))

    def snapshot(self, now_s: float) -> BoardSnapshot:
        """Return the current rows and lines."""
        remarks = tuple(self._remarks(now_s))
        return BoardSnapshot(self.columns, self.rows(now_s), self.line(now_s), remarks)

    def rows(self, now_s: float) -> list[ProcessRow]:
        """Return a row for each worker, and for each server that has reported."""
        columns = self.columns
        return [
            self._row(
                one,
                columns,
                steps_per_s=_rate(one, now_s),
                samples_per_s=_samples_per_s(one, now_s),
                input=_input(one, now_s),
                wait=_wait(one, now_s),
                sent_per_s=one.byte_rate.per_s(now_s, is_running=one.is_running),
            )
            for one in self._shown_processes()
        ]

    def final_rows(self, now_s: float | None = None) -> list[ProcessRow]:
        """Return the rows with rates and shares over all steps; the last ones if none was timed."""
        now_s = time.monotonic() if now_s is None else now_s
        columns, rows = self.columns, []
        for one in self._shown_processes():
            times = self.state.waits.workers.get(one.number) if one.is_worker else None
            if times is not None and times.took_s > 0:
                percent = 100 / times.took_s
                row = self._row(
                    one,
                    columns,
                    steps_per_s=times.steps / times.took_s,
                    samples_per_s=times.samples / times.took_s if times.samples else None,
                    input=percent * times.input_s,
                    compute=percent * times.compute_s,
                    wait=percent * times.wait_s,
                )
            else:
                compute, wait = one.values.get(COMPUTE_SHARE), one.values.get(COMM_SHARE)
                row = self._row(
                    one, columns, steps_per_s=_rate(one, now_s), compute=compute, wait=wait
                )
            rows.append(row)
        return rows

    def _row(self, one: Process, columns: Sequence[str], **figures: float | None) -> ProcessRow:
        return ProcessRow(
            label=one.label,
            step=one.step,
            state=one.state,
            values=_values(one, columns),
            staleness=self._staleness_of(one),
            **figures,
        )

    def line(self, now_s: float) -> str:
        """Return one line about all workers, for output that is not a terminal."""
        workers = self.state.workers()
        for state in (RUNNING, FINISHED):  # a lost worker does not slow down the rest
            if any(one.state == state for one in workers):
                workers = [one for one in workers if one.state in (state, "starting")]
                break
        reporting = [one for one in workers if one.step is not None]
        steps = [one.step for one in reporting if one.step is not None]
        if not steps:
            return f"0 of {len(workers)} ranks reporting"
        low, high = min(steps), max(steps)
        parts = [f"step {high}" if low == high else f"steps {low} to {high}"]
        rates = [found for one in reporting if (found := _rate(one, now_s)) is not None]
        if rates:
            parts.append(f"{rate(min(rates))} steps/s")
        parts += _samples(reporting, now_s)
        columns = self.columns
        shown = [_values(one, columns) for one in reporting]
        for name in columns:
            values = [of_one[name] for of_one in shown if name in of_one]
            if values:
                parts.append(f"{name} {number(values[0])}")
        parts += _span("input", [_input(one, now_s) for one in reporting], "%")
        parts += _span("wait", [_wait(one, now_s) for one in reporting], "%")
        parts += _span("staleness", [self._staleness_of(one) for one in reporting], "")
        if len(reporting) < len(workers):
            parts.append(f"{len(reporting)} of {len(workers)} ranks reporting")
        return ", ".join([*parts, *self._time_left(now_s), *self._straggler_text(now_s)])

    def _remarks(self, now_s: float) -> list[str]:
        running = self._running()
        together = _samples(running, now_s) if len(running) > 1 else []
        samples = [f"{text} in all" for text in together]
        return [*self._time_left(now_s), *self._straggler_text(now_s), *samples]

    def _time_left(self, now_s: float) -> list[str]:
        """Return the remaining time of the slowest worker, for which the job waits in the end."""
        left = [found for one in self._running() if (found := one.eta.left_s(now_s)) is not None]
        done = min((one.eta.done for one in self._running()), default=1.0)
        if not left or done >= 1:
            return []
        return [f"{100 * done:.0f} % done, {duration(round(max(left)))} left"]

    def straggler(self, now_s: float) -> Process | None:
        """Return the worker that all other workers wait for; None if none stands out.

        In lockstep the worker that enters an exchange last hardly waits in it; the others do.
        """
        waits = [(_wait(one, now_s), one) for one in self._running()]
        known = sorted(((w, one) for w, one in waits if w is not None), key=lambda pair: pair[0])
        if len(known) < 2 or known[1][0] < _NOTEWORTHY_WAIT or known[0][0] > known[1][0] / 2:
            return None
        return known[0][1]

    def _straggler_text(self, now_s: float) -> list[str]:
        slow = self.straggler(now_s)
        if slow is None:
            return []
        share = _input(slow, now_s)
        others = [_input(one, now_s) for one in self._running() if one is not slow]
        usual = [found for found in others if found is not None]
        why = ""
        if share is not None and usual:
            is_input = share - median(usual) > _NOTEWORTHY_WAIT / 2
            why = " (its input)" if is_input else " (its computation)"
        return [f"the other workers wait for worker {slow.label}{why}"]

    def _staleness_of(self, one: Process) -> float | None:
        """Return the mean staleness of a worker's updates; None if no update was stale."""
        state = self.state
        if self._staleness[0] != state.num_table_reports:
            means = _mean_staleness(merge(list(state.tables.values())))
            self._staleness = (state.num_table_reports, means)
        if not one.is_worker:
            return None
        if self._staleness[1]:
            return self._staleness[1].get(one.number)
        return one.values.get(STALENESS) or None

    def _shown_processes(self) -> list[Process]:
        return [one for one in self.state.in_order() if one.step is not None or one.is_worker]

    def _running(self) -> list[Process]:
        return [one for one in self.state.workers() if one.is_running]


@lru_cache(1024)
def _shown(name: str) -> str:
    return printable(name.encode())[:20]


def _values(one: Process, columns: Sequence[str]) -> dict[str, float]:
    """Return the values of the script that have a column, by displayed name."""
    named = ((_shown(name), value) for name, value in one.values.items() if name not in _UNNAMED)
    return {name: value for name, value in named if name in columns}


def _rate(one: Process, now_s: float) -> float | None:
    return one.step_rate.per_s(now_s, is_running=one.is_running)


def _samples_per_s(one: Process, now_s: float) -> float | None:
    return one.recent_steps.samples_per_s(now_s, is_running=one.is_running)


def _input(one: Process, now_s: float) -> float | None:
    shares = one.recent_steps.shares(now_s)
    return None if shares is None else shares[0]


def _wait(one: Process, now_s: float) -> float | None:
    shares = one.recent_steps.shares(now_s)
    return one.values.get(COMM_SHARE) if shares is None else shares[1]


def _samples(workers: Sequence[Process], now_s: float) -> list[str]:
    rates = [_samples_per_s(one, now_s) for one in workers]
    known = [found for found in rates if found is not None]
    return [f"{rate(sum(known))} samples/s"] if known else []


def _mean_staleness(tables: Sequence[TableReport]) -> dict[int, float]:
    """Return the mean staleness of each worker's updates over all tables; {} if all are 0."""
    sums: dict[int, list[int]] = {}
    for worker in (worker for table in tables for worker in table.workers):
        total = sums.setdefault(worker.worker, [0, 0])
        for age, count in worker.staleness.items():
            total[0] += age * count
            total[1] += count
    means = {worker: ages / max(count, 1) for worker, (ages, count) in sums.items()}
    return means if any(means.values()) else {}


def _span(name: str, found: Sequence[float | None], unit: str) -> list[str]:
    """Return "name low to high unit"; one number if both read alike."""
    known = [value for value in found if value is not None]
    if not known:
        return []
    low, high = (f"{v:.0f}" if unit else f"{v:.1f}" for v in (min(known), max(known)))
    return [f"{name} {low if low == high else f'{low} to {high}'} {unit}".rstrip()]
