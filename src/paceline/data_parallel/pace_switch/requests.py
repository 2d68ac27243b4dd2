"""Wishes for another pace while the job runs (`paceline set pace=...`), as a worker hears them.

The control thread answers at once, with a step that this worker will not pass before the wish is
settled (control/coordinator/pace_change.py); so the main thread waits, if at all, for a message.
The step is far enough away for workers that run ahead of each other: whoever waits for a slower one
in the middle of a step must be able to end it.

Threads: `_on_news` runs in the control thread; all else on the main thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.control.client.agent import Agent, PaceNews
from paceline.control.transport.messages import PaceAnswer, PaceSettled, PaceWanted
from paceline.control.wait_notice import WaitNotice
from paceline.runtime.job import Job

_SLICE_S = 0.5


class Steerable(Protocol):
    """A model whose pace may change."""

    @property
    def limit(self) -> int:
        """A step that it can be asked to stop behind, whatever it does at the moment."""

    def problem_with(self, pace: str) -> str:
        """Say why it cannot change to a pace; empty: it can. Only looks."""


@dataclass(frozen=True)
class Settled:
    """Behind a step the pace is another one."""

    pace: str
    step: int


class Wishes:
    """What one worker has heard. One for each job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._models: list[Callable[[], Steerable | None]] = []
        self._news = threading.Condition()
        self._number = 0  # of the newest wish
        self._limit: int | None = None  # while it is not settled
        self._settled: list[Settled] = []
        agent = job.rendezvous.agent
        if isinstance(agent, Agent):  # alone nobody has wishes
            agent.thread.post(self._begin, agent)

    def add(self, model: Callable[[], Steerable | None]) -> None:
        """Let one more model follow; before its first step."""
        with self._news:
            self._models.append(model)

    def heard(self, after: int, step: int) -> list[Settled]:
        """Return what was settled since the last `after` news, for a model that has done `step`.

        Waits if it must not go on before more is known.
        """
        if self._limit is None and len(self._settled) == after:  # nothing is new, as a rule
            return []
        notice = WaitNotice(f"rank {self.job.env.rank} waits for the others to agree on a pace")
        with self._news:
            while self._limit is not None and step >= self._limit:
                if self.job.rendezvous.agent.ending is not None:
                    raise self.job.rendezvous.agent.ending
                self._news.wait(_SLICE_S)
                notice.check()
            return self._settled[after:]

    @property
    def num_settled(self) -> int:
        """How many wishes were settled so far."""
        return len(self._settled)

    # -- in the control thread ----------------------------------------------------------------

    def _begin(self, agent: Agent) -> None:
        agent.on_pace = self._on_news
        if agent.pace_news is not None:
            self._on_news(agent.pace_news)
            agent.pace_news = None

    def _on_news(self, news: PaceNews) -> None:
        with self._news:
            if isinstance(news, PaceWanted):
                self._answer(news)
            elif news.number > self._number or self._limit is not None:
                self._settle(news)
            self._news.notify_all()

    def _answer(self, wanted: PaceWanted) -> None:
        agent = self.job.rendezvous.agent
        assert isinstance(agent, Agent)
        models = [model for model in (each() for each in self._models) if model is not None]
        problems = [problem for problem in (m.problem_with(wanted.pace) for m in models) if problem]
        if problems or not models:
            nothing = f"rank {self.job.env.rank} has no distributed model yet; try again later"
            answer = PaceAnswer(wanted.number, -1, problems[0] if problems else nothing)
        else:
            if self._limit is None or wanted.number != self._number:
                self._limit = max(model.limit for model in models)
            answer = PaceAnswer(wanted.number, self._limit)
        self._number = wanted.number
        agent.answer_pace(answer)

    def _settle(self, news: PaceSettled) -> None:
        self._number, self._limit = news.number, None
        if news.step >= 0:
            self._settled.append(Settled(news.pace, news.step))


_wishes: Wishes | None = None


def wishes_of(job: Job) -> Wishes:
    """Return the one of this process's job."""
    global _wishes
    if _wishes is None or _wishes.job is not job:
        _wishes = Wishes(job)
    return _wishes
