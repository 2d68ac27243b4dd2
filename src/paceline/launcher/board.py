"""The board: what each rank last said about its progress, and what became of it.

Plain data with a clock passed in; no terminal here. The launcher feeds it events and exits, and
takes pictures of it, which the display paints while the job runs and once more at its end. Every
worker has a row; a server gets one when it first reports something. A row belongs to a place: the
process that replaces another goes on in its row.

While the job runs, rates and shares are those of the last seconds; at its end, of all steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from paceline.errors import UsageError
from paceline.figures import duration, number, rate
from paceline.launcher.lines import printable
from paceline.launcher.picture import Picture, Row
from paceline.launcher.recent import Course, Recent, Trail
from paceline.launcher.seat import Seat
from paceline.mesh import Mesh
from paceline.telemetry.events import (
    CODEC_ERROR,
    COMM_SHARE,
    COMPUTE_SHARE,
    DONE_SHARE,
    LEARNING_RATE,
    STALENESS,
    Progress,
    Settled,
)
from paceline.telemetry.staleness import TableReport, merge
from paceline.telemetry.steps import Waits

# Of the script's own values; more do not fit beside each other. The shares come in addition.
MAX_COLUMNS = 5
_UNNAMED = (COMPUTE_SHARE, COMM_SHARE, STALENESS, DONE_SHARE)  # shown elsewhere than by their names
BY_THEMSELVES = (LEARNING_RATE, CODEC_ERROR)  # whatever the script says is shown before these
_WAITING = 40.0  # percent of the time that others must lose before a straggler is named


@dataclass
class _Rank:
    seat: Seat
    step: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    state: str = "running"
    trail: Trail = field(default_factory=Trail)  # of the step that is shown
    sent: Trail = field(default_factory=Trail)  # bytes
    recent: Recent = field(default_factory=Recent)
    course: Course = field(default_factory=Course)

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    def rate(self, now_s: float) -> float | None:
        return self.trail.per_s(now_s, is_running=self.is_running)

    def samples_per_s(self, now_s: float) -> float | None:
        return self.recent.samples_per_s(now_s, is_running=self.is_running)

    def input(self, now_s: float) -> float | None:
        shares = self.recent.shares(now_s)
        return None if shares is None else shares[0]

    def wait(self, now_s: float) -> float | None:
        shares = self.recent.shares(now_s)
        return self.values.get(COMM_SHARE) if shares is None else shares[1]


class Board:
    """The latest state of every rank. Not thread-safe: lives on the launcher's main thread."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._places: dict[tuple[int, int], _Rank] = {}  # by role and number
        self._by_rank: dict[int, _Rank] = {}
        for seat in seats:
            self.seat(seat)
        self._columns: list[str] = []
        self._reports: dict[tuple[str, int], TableReport] = {}
        self._staleness: dict[int, float] | None = {}  # by worker; None: to be looked at again
        self.waits = Waits()  # by number, also of those who are gone
        self.mesh: Mesh | None = None  # as the workers have settled it
        self.has_progress = False

    def seat(self, seat: Seat) -> None:
        """Give a process its row: that of its predecessor, if it has one."""
        rank = self._places.setdefault(seat.place, _Rank(seat))
        if rank.seat.rank != seat.rank:
            self._by_rank.pop(rank.seat.rank, None)
            rank = self._places[seat.place] = _Rank(seat)
        rank.state = "running"
        self._by_rank[seat.rank] = rank

    def remove(self, seat: Seat) -> None:
        """Take a row away: its process was no longer wanted and has left."""
        if self._by_rank.pop(seat.rank, None) is not None:
            del self._places[seat.place]

    def on_event(self, event: Any, now_s: float) -> None:
        """Take in what a process reported; what has no place on the board is ignored."""
        if isinstance(event, Progress):
            self.on_progress(event, now_s)
        elif isinstance(event, TableReport):
            self._reports[event.table, event.server] = event
            self._staleness = None
        elif isinstance(event, Settled) and "mesh" in event.values:
            with contextlib.suppress(UsageError):  # of a worker with another version than ours
                self.mesh = Mesh.parse(event.values["mesh"])

    def on_progress(self, event: Progress, now_s: float) -> None:
        """Take in one report; a rank that is not of this job is ignored."""
        rank = self._by_rank.get(event.rank)
        if rank is None:
            return
        rank.step = event.step
        for name, value in event.values.items():
            shown = printable(name.encode())[:20]
            if name in _UNNAMED or self._has_column(shown):
                rank.values[shown] = value
        rank.trail.add(now_s - event.age_s, event.step)
        if event.traffic is not None:
            rank.sent.add(now_s, event.traffic.num_bytes)
        if DONE_SHARE in event.values:
            rank.course.add(now_s, event.values[DONE_SHARE] / 100)
        if event.steps and rank.seat.is_worker:
            rank.recent.add(event.steps, now_s)
            # Who has finished took part in the last steps, which others may tell of later.
            taking_part = sum(one.state in ("running", "finished") for one in self._workers())
            self.waits.add(rank.seat.number, event.steps, taking_part)
        self.has_progress = True

    def _has_column(self, name: str) -> bool:
        """Say whether a value is shown; a new one gets a column while there is room."""
        if name not in self._columns:
            if len(self._columns) >= MAX_COLUMNS:
                return False
            self._columns.append(name)
        return True

    def set_state(self, rank: int, state: str) -> None:
        """Say in a few words what became of a rank."""
        if rank in self._by_rank:
            self._by_rank[rank].state = state

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the reported values in the order in which they first came."""
        return tuple(sorted(self._columns, key=lambda name: name in BY_THEMSELVES))

    def picture(self, now_s: float) -> Picture:
        """Return everything as it stands."""
        return Picture(self.columns, self.rows(now_s), self.line(now_s), tuple(self._words(now_s)))

    def rows(self, now_s: float) -> list[Row]:
        """Return every rank as it stands, and the servers that have something to say."""
        return [
            Row(
                label=rank.seat.label,
                step=rank.step,
                values=_own(rank.values),
                state=rank.state,
                steps_per_s=rank.rate(now_s),
                samples_per_s=rank.samples_per_s(now_s),
                input=rank.input(now_s),
                wait=rank.wait(now_s),
                staleness=self._staleness_of(rank),
                sent_per_s=rank.sent.per_s(now_s, is_running=rank.is_running),
            )
            for rank in self._shown()
        ]

    def final_rows(self, now_s: float | None = None) -> list[Row]:
        """Return every rank as it was over all of its steps, or at its end where none was timed."""
        now_s = time.monotonic() if now_s is None else now_s
        rows = []
        for rank in self._shown():
            times = self.waits.workers.get(rank.seat.number) if rank.seat.is_worker else None
            known = _own(rank.values)
            figures: dict[str, float | None] = {
                "steps_per_s": rank.rate(now_s),
                "compute": rank.values.get(COMPUTE_SHARE),
                "wait": rank.values.get(COMM_SHARE),
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
            staleness = self._staleness_of(rank)
            place = {"label": rank.seat.label, "step": rank.step, "state": rank.state}
            rows.append(Row(**place, values=known, staleness=staleness, **figures))  # type: ignore[arg-type]
        return rows

    def line(self, now_s: float) -> str:
        """Return the workers in one line, for a screen that is not a terminal."""
        workers = self._workers()
        for state in ("running", "finished"):  # who is lost does not slow the others down
            if any(rank.state == state for rank in workers):
                workers = [rank for rank in workers if rank.state in (state, "starting")]
                break
        told = [rank for rank in workers if rank.step is not None]
        steps = [rank.step for rank in told if rank.step is not None]
        if not steps:
            return f"0 of {len(workers)} ranks reporting"
        low, high = min(steps), max(steps)
        words = [f"step {high}" if low == high else f"steps {low} to {high}"]
        rates = [found for rank in told if (found := rank.rate(now_s)) is not None]
        if rates:
            words.append(f"{rate(min(rates))} steps/s")
        words += self._samples(told, now_s)
        for name in self.columns:
            values = [rank.values[name] for rank in told if name in rank.values]
            if values:
                words.append(f"{name} {number(values[0])}")
        words += _span("input", [rank.input(now_s) for rank in told], "%")
        words += _span("wait", [rank.wait(now_s) for rank in told], "%")
        words += _span("staleness", [self._staleness_of(rank) for rank in told], "")
        if len(told) < len(workers):
            words.append(f"{len(told)} of {len(workers)} ranks reporting")
        return ", ".join([*words, *self._left(now_s), *self._straggler_words(now_s)])

    def _words(self, now_s: float) -> list[str]:
        """Say what the table of a running job does not."""
        running = self._running()
        together = self._samples(running, now_s) if len(running) > 1 else []
        words = [f"{text} in all" for text in together]
        return [*self._left(now_s), *self._straggler_words(now_s), *words]

    def _samples(self, workers: Sequence[_Rank], now_s: float) -> list[str]:
        rates = [rank.samples_per_s(now_s) for rank in workers]
        known = [found for found in rates if found is not None]
        return [f"{rate(sum(known))} samples/s"] if known else []

    def _left(self, now_s: float) -> list[str]:
        """Say how long it will still take; by the slowest, for whom the job waits in the end."""
        left = [one for rank in self._running() if (one := rank.course.left_s(now_s)) is not None]
        done = min((rank.course.done for rank in self._running()), default=1.0)
        if not left or done >= 1:
            return []
        return [f"{100 * done:.0f} % done, {duration(round(max(left)))} left"]

    def straggler(self, now_s: float) -> str | None:
        """Name the worker that all others wait for; None when no one stands out.

        In lockstep whoever comes last to an exchange hardly waits in it, and everybody else does.
        """
        slow = self._straggler(now_s)
        return None if slow is None else slow.seat.label

    def _straggler(self, now_s: float) -> _Rank | None:
        waits = [(rank.wait(now_s), rank) for rank in self._running()]
        known = sorted(((w, rank) for w, rank in waits if w is not None), key=lambda one: one[0])
        if len(known) < 2 or known[1][0] < _WAITING or known[0][0] > known[1][0] / 2:
            return None
        return known[0][1]

    def _straggler_words(self, now_s: float) -> list[str]:
        slow = self._straggler(now_s)
        if slow is None:
            return []
        shares = slow.input(now_s)
        others = [rank.input(now_s) for rank in self._running() if rank is not slow]
        usual = [share for share in others if share is not None]
        why = ""
        if shares is not None and usual:
            # The others' computing takes as long as its own would, without what it does more of.
            why = " (its input)" if shares - median(usual) > _WAITING / 2 else " (its computing)"
        return [f"the others wait for rank {slow.seat.label}{why}"]

    def _staleness_of(self, rank: _Rank) -> float | None:
        """Return the mean staleness of a worker's updates; None where all are fresh."""
        if self._staleness is None:
            self._staleness = _mean_staleness(merge(list(self._reports.values())))
        if not rank.seat.is_worker:
            return None
        if self._staleness:
            return self._staleness.get(rank.seat.number)
        return rank.values.get(STALENESS) or None

    def _shown(self) -> list[_Rank]:
        ranks = [self._places[place] for place in sorted(self._places)]
        return [rank for rank in ranks if rank.step is not None or rank.seat.is_worker]

    def _workers(self) -> list[_Rank]:
        ranks = [self._places[place] for place in sorted(self._places)]
        return [rank for rank in ranks if rank.seat.is_worker]

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._by_rank.values() if rank.seat.is_worker and rank.is_running]


def _own(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name not in _UNNAMED}


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
