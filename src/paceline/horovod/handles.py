"""Handles of asynchronous operations: numbers, as in Horovod, for `poll` and `synchronize`.

A handle is dropped when its result has been taken: a second `synchronize` returns None.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import (
    CollectiveMismatch,
    HorovodInternalError,
    PacelineError,
    PeerError,
    UsageError,
)
from paceline.horovod import session, timeline
from paceline.runtime.work import Handle as EngineHandle


class Pending:
    """An operation that has been started: what to wait for, and how its result is made."""

    def __init__(self, name: str, work: EngineHandle, finish: Callable[[], Any]) -> None:
        self.name = name
        self._work = work
        self._finish = finish
        self._result: list[Any] = []
        self._started_s = timeline.now_s()
        self._mu = threading.Lock()

    def done(self) -> bool:
        """Return whether the operation has ended; then its result has been written."""
        if not self._work.done():
            return False
        if self._work.error() is None:
            self.result()
        return True

    def result(self) -> Any:
        """Wait for the result; raise HorovodInternalError if the operation failed."""
        with translated():
            self._work.wait()
        with self._mu:
            if not self._result:
                self._result.append(self._finish())
                timeline.add(self.name, self._started_s)
        return self._result[0]


class Several:
    """The operations of a grouped call."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def result(self) -> list[Any]:
        """Wait for all parts, also if one has failed: none is left behind."""
        results, failure = [], None
        for part in self._parts:
            try:
                results.append(part.result())
            except PacelineError as error:  # noqa: PERF203
                failure = failure or error
        if failure is not None:
            raise failure
        return results


class OperationHandle(int):
    """The number of an operation in flight; calling it returns its result."""

    def __call__(self) -> Any:
        return synchronize(self)


_numbers = itertools.count(1)
_pending: dict[int, Pending | Several] = {}


def add(pending: Pending | Several) -> OperationHandle:
    """Return a new handle."""
    handle = OperationHandle(next(_numbers))
    _pending[handle] = pending
    return handle


def poll(handle: int) -> bool:
    """Return whether an operation has ended; `synchronize` then returns at once."""
    if handle not in _pending:
        session.current()
        raise UsageError(f"handle {handle} does not exist, or its result has been taken already")
    return _pending[handle].done()


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None if it has been taken already."""
    pending = _pending.pop(handle, None)
    return None if pending is None else pending.result()


def drop_all() -> None:
    """Forget the operations in flight: the job ends."""
    _pending.clear()


session.at_shutdown(drop_all)


class translated:
    """Raise errors of operations as HorovodInternalError; mistakes of the caller as they are."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_mistake = isinstance(error, UsageError) and not isinstance(error, CollectiveMismatch)
        if is_mistake or not isinstance(error, PacelineError):
            return
        if isinstance(error, HorovodInternalError):
            return
        failed = HorovodInternalError(_text(error))
        failed.peer_error = error if isinstance(error, PeerError) else None
        raise failed from error


def _text(error: PacelineError) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, PeerError) else str(error)
