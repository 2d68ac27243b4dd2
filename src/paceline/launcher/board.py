"""The board: what each rank last said about its progress, and what became of it.

Plain data with a clock passed in; no terminal here. The launcher feeds it events and exits, and
takes `Row`s out of it, which the display paints while the job runs and once more at its end. Every
worker has a row; a server gets one when it first reports something. A row belongs to a place: the
process that replaces another goes on in its row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.launcher.lines import printable
from paceline.launcher.seat import Seat
from paceline.telemetry.events import COMM_SHARE, COMPUTE_SHARE, Progress

# Steps per second are measured over the last few seconds, so that a stall shows up soon.
_WINDOW_S = 8.0
# Of the script's own values; more do not fit beside each other. The shares come in addition.
MAX_COLUMNS = 5
SHARES = (COMPUTE_SHARE, COMM_SHARE)
_WAITING = 40.0  # percent of the time that others must lose before a straggler is named


@dataclass(frozen=True)
class Row:
    """One process as it is shown; `label` is its rank, or s0, s1 ... for a server."""

    label: str
    step: int | None
    values: Mapping[str, float]
    steps_per_s: float | None
    state: str


@dataclass
class _Rank:
    seat: Seat
    step: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    state: str = "running"
    # (time, step) pairs of the last seconds; the rate is the slope from the oldest to the newest.
    trail: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=256))


class Board:
    """The latest state of every rank. Not thread-safe: lives on the launcher's main thread."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._places: dict[tuple[int, int], _Rank] = {}  # by role and number
        self._by_rank: dict[int, _Rank] = {}
        for seat in seats:
            self.seat(seat)
        self._columns: list[str] = []
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

    def on_progress(self, event: Progress, now_s: float) -> None:
        """Take in one report; a rank that is not of this job is ignored."""
        rank = self._by_rank.get(event.rank)
        if rank is None:
            return
        rank.step = event.step
        for name, value in event.values.items():
            shown = printable(name.encode())[:20]
            if self._has_column(shown):
                rank.values[shown] = value
        if rank.trail and event.step < rank.trail[-1][1]:
            rank.trail.clear()  # the script began to count anew
        if not rank.trail or event.step > rank.trail[-1][1]:
            rank.trail.append((now_s - event.age_s, event.step))
        self.has_progress = True

    def _has_column(self, name: str) -> bool:
        """Say whether a value is shown; a new one gets a column while there is room."""
        if name in self._columns:
            return True
        own = sum(column not in SHARES for column in self._columns)
        if name not in SHARES and own >= MAX_COLUMNS:
            return False
        self._columns.append(name)
        return True

    def set_state(self, rank: int, state: str) -> None:
        """Say in a few words what became of a rank."""
        if rank in self._by_rank:
            self._by_rank[rank].state = state

    @property
    def _ranks(self) -> list[_Rank]:
        return [self._places[place] for place in sorted(self._places)]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the reported values in the order in which they first came; shares last."""
        return tuple(sorted(self._columns, key=lambda name: name in SHARES))

    def rows(self, now_s: float) -> list[Row]:
        """Return every rank as it stands, and the servers that have something to say."""
        return [
            Row(rank.seat.label, rank.step, dict(rank.values), _rate(rank, now_s), rank.state)
            for rank in self._ranks
            if rank.step is not None or rank.seat.is_worker
        ]

    def line(self, now_s: float) -> str:
        """Return the workers in one line, for a screen that is not a terminal."""
        workers = [rank for rank in self._ranks if rank.seat.is_worker]
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
        rates = [rate for rank in told if (rate := _rate(rank, now_s)) is not None]
        if rates:
            words.append(f"{number(min(rates))} steps/s")
        for name in self.columns:
            values = [rank.values[name] for rank in told if name in rank.values]
            if values:
                words.append(_words(name, values))
        if len(told) < len(workers):
            words.append(f"{len(told)} of {len(workers)} ranks reporting")
        straggler = self.straggler()
        if straggler is not None:
            words.append(f"the others wait for rank {straggler}")
        return ", ".join(words)

    def straggler(self) -> str | None:
        """Name the worker that all others wait for; None when no one stands out.

        In lockstep whoever comes last to an exchange hardly waits in it, and everybody else does.
        """
        shares = sorted(
            (rank.values[COMM_SHARE], rank.seat.label)
            for rank in self._ranks
            if COMM_SHARE in rank.values and rank.seat.is_worker and rank.state == "running"
        )
        if len(shares) < 2 or shares[1][0] < _WAITING or shares[0][0] > shares[1][0] / 2:
            return None
        return shares[0][1]


def _rate(rank: _Rank, now_s: float) -> float | None:
    if len(rank.trail) < 2:
        return None
    until_s = now_s if rank.state == "running" else rank.trail[-1][0]
    while len(rank.trail) > 2 and until_s - rank.trail[0][0] > _WINDOW_S:
        rank.trail.popleft()
    (first_s, first), (_, last) = rank.trail[0], rank.trail[-1]
    elapsed_s = until_s - first_s
    return (last - first) / elapsed_s if elapsed_s > 0 else None


def _words(name: str, values: Sequence[float]) -> str:
    """Say one value in a line: the first rank's, but the span over all ranks of a share."""
    if name not in SHARES:
        return f"{name} {cell(name, values[0])}"
    low, high = cell(name, min(values)), cell(name, max(values))
    return f"{name.removesuffix(' %')} {low if low == high else f'{low} to {high}'} %"


def cell(name: str, value: float) -> str:
    """Write a value for its column: shares as whole percents, which are all they are good for."""
    return f"{value:.0f}" if name in SHARES else number(value)


def number(value: float) -> str:
    """Write a reported value in at most nine characters."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"
