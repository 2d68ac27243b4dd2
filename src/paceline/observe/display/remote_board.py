"""A job as an onlooker sees it: a board that is fed with the coordinator's news.

The launcher knows what became of its processes; an onlooker (`paceline top`) only hears who left,
who was lost, and what they reported while it listened.

Threads: news come in the operator's thread, pictures are taken in any other.
"""

from __future__ import annotations

import threading
import time

from paceline.control import messages as m
from paceline.control.member import Member
from paceline.control.operator_messages import Happened, Notification, Status
from paceline.observe.display.board import Board, Picture
from paceline.runtime.process_names import ProcessName, names

_STATES = {"left": "finished", "lost": "lost", "silent": "silent", "back": "running"}


class Watched:
    """One job, from the moment on when somebody began to watch it."""

    def __init__(self) -> None:
        self._mu = threading.Lock()
        self._board = Board([])  # guarded by: _mu, like everything below
        self._process_names: dict[int, ProcessName] = {}
        self._states: dict[int, str] = {}  # of those about whom there is something to say
        self._why: dict[int, str] = {}  # of those who were lost
        self._over = ""

    def take(self, status: Status) -> None:
        """Begin with how the job is."""
        now_s = time.monotonic()
        with self._mu:
            for member in () if status.membership is None else status.membership.members:
                self._seat(member)
            for report in status.reports:
                self._board.on_event(report, now_s)
            self._over = status.over

    def on_notification(self, news: Notification) -> None:
        """Take in what happens."""
        with self._mu:
            if isinstance(news, Happened):
                self._board.on_event(news.event, time.monotonic())
            elif isinstance(news, m.Changed):
                for loss in news.lost:
                    self._mark(loss.rank, "lost", loss.why)
                for member in news.membership.members:
                    self._seat(member)
            elif isinstance(news, m.Presence):
                self._mark(news.rank, _STATES.get(news.state, news.state), news.text)
            elif isinstance(news, m.Over):
                self._over = news.why

    @property
    def has_progress(self) -> bool:
        """Whether anybody has reported something."""
        with self._mu:
            return self._board.has_progress

    def picture(self) -> Picture:
        """Return the job as it stands."""
        with self._mu:
            return self._board.picture(time.monotonic())

    def end_words(self) -> str:
        """Say how the job has ended, as far as an onlooker can know."""
        with self._mu:
            if self._over:
                return self._over
            for rank, why in self._why.items():
                return f"{self._process_names[rank]} was lost: {why}"
            workers = [name for name in self._process_names.values() if name.is_worker]
            left = [name for name in workers if self._states.get(name.rank) == "finished"]
            if not left:
                return "it was stopped"
            return f"{names(left)} finished" + ("" if len(left) == len(workers) else ", others not")

    def _seat(self, member: Member) -> None:
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
