"""Several Works as one, and Works after which something has to be copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.ps import messages as m
from paceline.work import Work


class Together:
    """Several Works as one; their results as a list."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self.results: list[Any] = []

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.results:
            self.results = [work.wait(timeout_s) for work in self._works]

    def error(self) -> Exception | None:
        found = (work.error() for work in self._works)
        return next((error for error in found if error is not None), None)

    def work(self) -> Work[Any]:
        return Work(self, lambda: self.results, self._works)


class Landed:
    """A Work after which tensors are brought from where they landed to where they belong."""

    def __init__(self, work: Work[m.Reply], settle: Callable[[], None]) -> None:
        self._work, self._settle, self._is_settled = work, settle, False
        self.done, self.error = work.done, work.error

    def wait(self, timeout_s: float | None = None) -> m.Reply:
        reply = self._work.wait(timeout_s)
        if not self._is_settled:
            self._is_settled = True
            self._settle()
        return reply
