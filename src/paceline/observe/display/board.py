"""The board: the state of a run (observe/telemetry/run_state.py) as rows and lines for people.

The launcher feeds it events and exits, and takes pictures of it, which the display paints while the
job runs and once more at its end. Every worker has a row; a server gets one when it first reports
something. A row belongs to a place: the process that replaces another goes on in its row.

While the job runs, rates and shares are those of the last seconds; at its end, of all steps.
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
    DONE_SHARE,
    LEARNING_RATE,
    STALENESS,
    Event,
    Happening,
)
from paceline.observe.telemetry.run_state import FINISHED, RUNNING, Process, RunState
from paceline.observe.telemetry.staleness import TableReport, merge
from paceline.runtime.formatting import duration, number, rate
from paceline.runtime.process_names import ProcessName

# Of the script's own values; more do not fit beside each other. The shares come in addition.
MAX_COLUMNS = 5
_UNNAMED = (COMPUTE_SHARE, COMM_SHARE, STALENESS, DONE_SHARE)  # shown elsewhere than by their names
BY_THEMSELVES = (LEARNING_RATE, CODEC_ERROR)  # whatever the script says is shown before these
_WAITING = 40.0  # percent of the time that others must lose before a straggler is named


@dataclass(frozen=True, kw_only=True)
class Row:
    """One process as it is shown; `label` is its rank, or s0, s1 ... for a server.

    Shares are in percent of the time of steps. What nobody knows is None, and what nobody knows of
    any process gets no column.
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
class Picture:
    """All processes at one moment. `columns` are the names of reported values, in order."""

    columns: tuple[str, ...]
    rows: Sequence[Row]
    line: str  # the same in one line
    words: tuple[str, ...] = ()  # what the table does not say, the most important first


class Board:
    """Shows the state of a run. Not thread-safe: lives on the launcher's main thread."""

    def __init__(self, process_names: Sequence[ProcessName]) -> None:
        self.state = RunState()
        for name in process_names:
            self.add(name)
        self._staleness: tuple[int, dict[int, float]] = (0, {})  # after so many reports; by worker

    def add(self, name: ProcessName) -> None:
        """Give a process its row: that of its predecessor, if it has one."""
        self.state.add(name.rank, name.role, name.number)

    def remove(self, name: ProcessName) -> None:
        """Take a row away: its process was no longer wanted and has left."""
        self.state.remove(name.rank)

    def set_state(self, rank: int, state: str) -> None:
        """Put in a few words what became of a rank."""
        self.state.set_state(rank, state)

    def on_event(self, event: Event | Happening, now_s: float) -> None:
        """Take in what a process reported."""
        self.state.apply(now_s, event)

    @property
    def has_progress(self) -> bool:
        """Whether any process has reported something."""
        return self.state.has_progress

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the reported values that are shown, in the order in which they came."""
        names = dict.fromkeys(_shown(name) for name in self.state.names if name not in _UNNAMED)
        return tuple(sorted(list(names)[:MAX_COLUMNS], key=lambda name: name in BY_THEMSELVES))

    def picture(self, now_s: float) -> Picture:
        """Return everything as it stands."""
        return Picture(self.columns, self.rows(now_s), self.line(now_s), tuple(self._words(now_s)))

    def rows(self, now_s: float) -> list[Row]:
        """Return every rank as it stands, and the servers that have something to say."""
        columns = self.columns
        return [
            Row(
                label=one.label,
                step=one.step,
                values=_values(one, columns),
                state=one.state,
                steps_per_s=_rate(one, now_s),
                samples_per_s=_samples_per_s(one, now_s),
                input=_input(one, now_s),
                wait=_wait(one, now_s),
                staleness=self._staleness_of(one),
                sent_per_s=one.sent.per_s(now_s, is_running=one.is_running),
            )
            for one in self._rows()
        ]

    def final_rows(self, now_s: float | None = None) -> list[Row]:
        """Return every rank as it was over all of its steps, or at its end where none was timed."""
        now_s = time.monotonic() if now_s is None else now_s
        columns, rows = self.columns, []
        for one in self._rows():
            times = self.state.waits.workers.get(one.number) if one.is_worker else None
            figures: dict[str, float | None] = {
                "steps_per_s": _rate(one, now_s),
                "compute": one.values.get(COMPUTE_SHARE),
                "wait": one.values.get(COMM_SHARE),
            }
            if times is not None and times.took_s > 0:
                percent = 100 / times.took_s
                figures = {
                    "steps_per_s": times.steps / times.took_s,
                    "samples_per_s": times.samples / times.took_s if times.samples else None,
                    "input": percent * times.input_s,
                    "compute": percent * times.compute_s,
                    "wait": percent * times.wait_s,
                }
            row = Row(
                label=one.label,
                step=one.step,
                state=one.state,
                values=_values(one, columns),
                staleness=self._staleness_of(one),
                **figures,
            )
            rows.append(row)
        return rows

    def line(self, now_s: float) -> str:
        """Return the workers in one line, for a screen that is not a terminal."""
        workers = self.state.workers()
        for state in (RUNNING, FINISHED):  # who is lost does not slow the others down
            if any(one.state == state for one in workers):
                workers = [one for one in workers if one.state in (state, "starting")]
                break
        told = [one for one in workers if one.step is not None]
        steps = [one.step for one in told if one.step is not None]
        if not steps:
            return f"0 of {len(workers)} ranks reporting"
        low, high = min(steps), max(steps)
        words = [f"step {high}" if low == high else f"steps {low} to {high}"]
        rates = [found for one in told if (found := _rate(one, now_s)) is not None]
        if rates:
            words.append(f"{rate(min(rates))} steps/s")
        words += _samples(told, now_s)
        columns = self.columns
        shown = [_values(one, columns) for one in told]
        for name in columns:
            values = [of_one[name] for of_one in shown if name in of_one]
            if values:
                words.append(f"{name} {number(values[0])}")
        words += _span("input", [_input(one, now_s) for one in told], "%")
        words += _span("wait", [_wait(one, now_s) for one in told], "%")
        words += _span("staleness", [self._staleness_of(one) for one in told], "")
        if len(told) < len(workers):
            words.append(f"{len(told)} of {len(workers)} ranks reporting")
        return ", ".join([*words, *self._left(now_s), *self._straggler_words(now_s)])

    def _words(self, now_s: float) -> list[str]:
        """Say what the table of a running job does not."""
        running = self._running()
        together = _samples(running, now_s) if len(running) > 1 else []
        words = [f"{text} in all" for text in together]
        return [*self._left(now_s), *self._straggler_words(now_s), *words]

    def _left(self, now_s: float) -> list[str]:
        """Say how long it will still take; by the slowest, for whom the job waits in the end."""
        left = [found for one in self._running() if (found := one.course.left_s(now_s)) is not None]
        done = min((one.course.done for one in self._running()), default=1.0)
        if not left or done >= 1:
            return []
        return [f"{100 * done:.0f} % done, {duration(round(max(left)))} left"]

    def straggler(self, now_s: float) -> Process | None:
        """Return the worker that all others wait for; None when no one stands out.

        In lockstep whoever comes last to an exchange hardly waits in it, and everybody else does.
        """
        waits = [(_wait(one, now_s), one) for one in self._running()]
        known = sorted(((w, one) for w, one in waits if w is not None), key=lambda pair: pair[0])
        if len(known) < 2 or known[1][0] < _WAITING or known[0][0] > known[1][0] / 2:
            return None
        return known[0][1]

    def _straggler_words(self, now_s: float) -> list[str]:
        slow = self.straggler(now_s)
        if slow is None:
            return []
        share = _input(slow, now_s)
        others = [_input(one, now_s) for one in self._running() if one is not slow]
        usual = [found for found in others if found is not None]
        why = ""
        if share is not None and usual:
            # The others' computing takes as long as its own would, without what it does more of.
            why = " (its input)" if share - median(usual) > _WAITING / 2 else " (its computing)"
        return [f"the others wait for rank {slow.label}{why}"]

    def _staleness_of(self, one: Process) -> float | None:
        """Return the mean staleness of a worker's updates; None where all are fresh."""
        state = self.state
        if self._staleness[0] != state.num_tables_told:
            means = _mean_staleness(merge(list(state.tables.values())))
            self._staleness = (state.num_tables_told, means)
        if not one.is_worker:
            return None
        if self._staleness[1]:
            return self._staleness[1].get(one.number)
        return one.values.get(STALENESS) or None

    def _rows(self) -> list[Process]:
        return [one for one in self.state.in_order() if one.step is not None or one.is_worker]

    def _running(self) -> list[Process]:
        return [one for one in self.state.workers() if one.is_running]


@lru_cache(1024)
def _shown(name: str) -> str:
    return printable(name.encode())[:20]


def _values(one: Process, columns: Sequence[str]) -> dict[str, float]:
    """Return what the script reported, by the names to show, as far as there are columns."""
    named = ((_shown(name), value) for name, value in one.values.items() if name not in _UNNAMED)
    return {name: value for name, value in named if name in columns}


def _rate(one: Process, now_s: float) -> float | None:
    return one.trail.per_s(now_s, is_running=one.is_running)


def _samples_per_s(one: Process, now_s: float) -> float | None:
    return one.recent.samples_per_s(now_s, is_running=one.is_running)


def _input(one: Process, now_s: float) -> float | None:
    shares = one.recent.shares(now_s)
    return None if shares is None else shares[0]


def _wait(one: Process, now_s: float) -> float | None:
    shares = one.recent.shares(now_s)
    return one.values.get(COMM_SHARE) if shares is None else shares[1]


def _samples(workers: Sequence[Process], now_s: float) -> list[str]:
    rates = [_samples_per_s(one, now_s) for one in workers]
    known = [found for found in rates if found is not None]
    return [f"{rate(sum(known))} samples/s"] if known else []


def _mean_staleness(tables: Sequence[TableReport]) -> dict[int, float]:
    """Return the mean staleness of each worker's updates, over all tables; nothing if all are 0."""
    sums: dict[int, list[int]] = {}
    for worker in (worker for table in tables for worker in table.workers):
        total = sums.setdefault(worker.worker, [0, 0])
        for age, count in worker.staleness.items():
            total[0] += age * count
            total[1] += count
    means = {worker: ages / max(count, 1) for worker, (ages, count) in sums.items()}
    return means if any(means.values()) else {}


def _span(name: str, found: Sequence[float | None], unit: str) -> list[str]:
    """Say the lowest and the highest of what is known; one of them where they read alike."""
    known = [value for value in found if value is not None]
    if not known:
        return []
    low, high = (f"{v:.0f}" if unit else f"{v:.1f}" for v in (min(known), max(known)))
    return [f"{name} {low if low == high else f'{low} to {high}'} {unit}".rstrip()]
