"""An operation of the client: requests to several servers that are waited for as one.

Refusals are raised when every server has answered, so that no server uses the memory any more; a
server that is lost is raised at once, since the others may wait for it for ever.

Threads: any. Whoever waits first takes the answers; `settled` returns an error that nobody has
seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import PacelineError, PeerError, PeerTimeout
from paceline.work import Work


class Operation:
    """The handle behind the client's Works."""

    def __init__(
        self, what: str, works: Sequence[Work[Any]], finish: Callable[[list[Any]], Any], keep: Any
    ) -> None:
        self._what = what
        self._works = works
        self._finish = finish  # turns the answers into the result
        self._keep = keep  # memory that servers use until they have answered
        self._mu = threading.Lock()
        self._has_ended = False  # guarded by: _mu; so are the next three
        self._result: Any = None
        self._error: Exception | None = None
        self.is_seen = False  # somebody has got the outcome

    def work(self) -> Work[Any]:
        return Work(self, lambda: self._result, self)

    def done(self) -> bool:
        return self._has_ended or all(work.done() for work in self._works)

    def error(self) -> Exception | None:
        if not self._has_ended and self.done():
            self._take(None)
        return self._error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all answers; raise what went wrong. PeerTimeout: it goes on."""
        self._take(timeout_s)
        self.is_seen = True
        if self._error is not None:
            raise self._error

    def settled(self) -> Exception | None:
        """Wait until its memory can be used again; return an error that nobody has seen yet."""
        self._take(None)
        was_seen, self.is_seen = self.is_seen, True
        return None if was_seen else self._error

    def _take(self, timeout_s: float | None) -> None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._mu.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise PeerTimeout(f"{self._what}: no answer within {timeout_s} s; it goes on")
        try:
            if not self._has_ended:
                self._collect(deadline_s)
        finally:
            self._mu.release()

    def _collect(self, deadline_s: float | None) -> None:
        answers: list[Any] = []
        try:
            for work in self._works:
                self._collect_one(work, deadline_s, answers)
            if self._error is None:
                self._result = self._finish(answers)
        except PeerError as error:
            if deadline_s is not None and not self._works[len(answers)].done():
                raise  # only this wait has ended
            self._error = error
        self._has_ended = True
        self._works, self._keep = (), None

    def _collect_one(self, work: Work[Any], deadline_s: float | None, answers: list[Any]) -> None:
        left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
        try:
            answers.append(work.wait(left_s))
        except PeerError:
            raise
        except PacelineError as error:
            answers.append(None)
            self._error = self._error or error
