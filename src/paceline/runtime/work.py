"""Work: the handle of an asynchronous operation.

The caller that starts an operation gets a Work and asks it for the outcome. `wait()` raises the
operation's error (every time it is called), and `error()` returns it; it is lost only if neither is
called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

Result = TypeVar("Result")


class Handle(Protocol):
    """An operation in progress: the engine's handle, or a Work."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> object: ...
    def error(self) -> Exception | None: ...


class Work(Generic[Result]):
    """An asynchronous operation; thread-safe."""

    def __init__(self, handle: Handle, finish: Callable[[], Result], keep: object = None) -> None:
        self._handle = handle
        self._finish = finish  # turns the finished operation into what the caller asked for
        self._keep = keep  # memory that the engine uses until the operation has ended
        self._result: list[Result] = []

    @property
    def handle(self) -> Handle:
        """The engine's handle; for waiting for one of several (`_core.wait_any`)."""
        return self._handle

    def wait(self, timeout_s: float | None = None) -> Result:
        """Block until the operation has ended; return its result or raise its error.

        PeerTimeout if `timeout_s` passes first: the operation then continues.
        """
        self._handle.wait(timeout_s)
        if not self._result:
            self._result.append(self._finish())
            self._keep = None
        return self._result[0]

    def done(self) -> bool:
        """Return whether the operation has ended, with or without an error. Never blocks."""
        return self._handle.done()

    def error(self) -> Exception | None:
        """Return the operation's error; None while it runs and if it succeeded."""
        return self._handle.error()


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
