"""The board of a job that another process watches (`paceline top`).

The launcher knows how its processes ended. A watching process only receives the coordinator's news:
which members left or were lost, and what they reported since it connected.

Threads: news arrive in the operator's thread, any other thread takes snapshots.
"""

from __future__ import annotations

import threading
import time

from paceline.control import messages as m
from paceline.control.member import Member
from paceline.control.operator_messages import Happened, Notification, Status
from paceline.observe.display.board import Board, BoardSnapshot
from paceline.runtime.process_names import ProcessName, names

_STATES = {"left": "finished", "lost": "lost", "silent": "silent", "back": "running"}


class RemoteBoard:
    """One job, from the moment at which this process began to watch it."""

    def __init__(self) -> None:
        self._mu = threading.Lock()
        self._board = Board([])  # guarded by: _mu, like everything below
        self._process_names: dict[int, ProcessName] = {}
        self._states: dict[int, str] = {}  # of processes that left or are not well
        self._why: dict[int, str] = {}  # of lost processes
        self._over = ""

    def take(self, status: Status) -> None:
        """Begin with the current status of the job."""
        now_s = time.monotonic()
        with self._mu:
            for member in () if status.membership is None else status.membership.members:
                self._add(member)
            for report in status.reports:
                self._board.on_event(report, now_s)
            self._over = status.over

    def on_notification(self, news: Notification) -> None:
        """Apply news of the coordinator."""
        with self._mu:
            if isinstance(news, Happened):
                self._board.on_event(news.event, time.monotonic())
            elif isinstance(news, m.Changed):
                for loss in news.lost:
                    self._mark(loss.rank, "lost", loss.why)
                for member in news.membership.members:
                    self._add(member)
            elif isinstance(news, m.Presence):
                self._mark(news.rank, _STATES.get(news.state, news.state), news.text)
            elif isinstance(news, m.Over):
                self._over = news.why

    @property
    def has_progress(self) -> bool:
        """Whether any process has reported something."""
        with self._mu:
            return self._board.has_progress

    def snapshot(self) -> BoardSnapshot:
        """Return the current rows and lines."""
        with self._mu:
            return self._board.snapshot(time.monotonic())

    def describe_end(self) -> str:
        """Return how the job ended, as far as a watching process can know."""
        with self._mu:
            if self._over:
                return self._over
            for rank, why in self._why.items():
                return f"{self._process_names[rank]} was lost: {why}"
            workers = [name for name in self._process_names.values() if name.is_worker]
            left = [name for name in workers if self._states.get(name.rank) == "finished"]
            if not left:
                return "it was stopped"
            rest = [name for name in workers if name not in left]
            return f"{names(left)} finished" + (f", {names(rest)} did not" if rest else "")

    def _add(self, member: Member) -> None:
        if member.rank in self._process_names:
            return
        is_server, is_data_worker = member.role == "server", member.role == "data"
        name = ProcessName(member.rank, member.number, is_server, is_data_worker=is_data_worker)
        self._process_names[member.rank] = name
        self._board.add(name)

    def _mark(self, rank: int, state: str, why: str) -> None:
        if rank not in self._process_names:
            return
        self._states[rank] = state
        self._board.set_state(rank, state)
        if state == "lost":
            self._why[rank] = why
