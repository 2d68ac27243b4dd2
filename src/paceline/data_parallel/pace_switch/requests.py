"""Requests for another pace while the job runs (`paceline set pace=...`), on a worker.

The control thread replies at once, with a step that this worker will not pass before the change is
agreed on (control/coordinator/pace_change.py); so the main thread waits, if at all, for a message.
The step is far enough ahead for workers of different speed: a worker that waits for a slower one in
the middle of a step must be able to finish that step.

Threads: `_on_news` runs in the control thread; all else on the main thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.control.client.agent import Agent, PaceMessage
from paceline.control.messages import PaceAnswer, PaceSettled, PaceWanted
from paceline.control.wait_notice import WaitNotice
from paceline.runtime.job import Job

_SLICE_S = 0.5


class Steerable(Protocol):
    """A model whose pace may change."""

    @property
    def limit(self) -> int:
        """A step that it can be asked to stop after, whatever it does at the moment."""

    def find_pace_problem(self, pace: str) -> str:
        """Return why it cannot change to a pace; "" if it can. Changes nothing."""


@dataclass(frozen=True)
class AgreedPaceChange:
    """After this step the pace is another one."""

    pace: str
    step: int


class PaceRequests:
    """The requests that one worker has received. One for each job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._models: list[Callable[[], Steerable | None]] = []
        self._news = threading.Condition()
        self._number = 0  # of the newest request
        self._limit: int | None = None  # while it is not agreed on
        self._agreed: list[AgreedPaceChange] = []
        agent = job.rendezvous.agent
        if isinstance(agent, Agent):  # a process without a launcher gets no requests
            agent.thread.post(self._begin, agent)

    def add(self, model: Callable[[], Steerable | None]) -> None:
        """Include one more model; before its first step."""
        with self._news:
            self._models.append(model)

    def wait_for_agreed(self, after: int, step: int) -> list[AgreedPaceChange]:
        """Return what was agreed on after the first `after` changes, for a model at `step`.

        Waits if the model must not continue before a change is agreed on.
        """
        if self._limit is None and len(self._agreed) == after:  # as a rule
            return []
        notice = WaitNotice(f"rank {self.job.env.rank} waits for the others to agree on a pace")
        with self._news:
            while self._limit is not None and step >= self._limit:
                if self.job.rendezvous.agent.ending is not None:
                    raise self.job.rendezvous.agent.ending
                self._news.wait(_SLICE_S)
                notice.check()
            return self._agreed[after:]

    @property
    def num_agreed(self) -> int:
        """How many changes have been agreed on so far."""
        return len(self._agreed)

    # -- in the control thread ----------------------------------------------------------------

    def _begin(self, agent: Agent) -> None:
        agent.on_pace = self._on_news
        if agent.pace_message is not None:
            self._on_news(agent.pace_message)
            agent.pace_message = None

    def _on_news(self, news: PaceMessage) -> None:
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
        problems = [
            problem for problem in (m.find_pace_problem(wanted.pace) for m in models) if problem
        ]
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
            self._agreed.append(AgreedPaceChange(news.pace, news.step))


_requests: PaceRequests | None = None


def pace_requests_of(job: Job) -> PaceRequests:
    """Return the requests of this process's job."""
    global _requests
    if _requests is None or _requests.job is not job:
        _requests = PaceRequests(job)
    return _requests
