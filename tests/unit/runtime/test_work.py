"""Work: results are made once, errors come every time, memory is kept as long as it is needed."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from paceline.errors import PeerLost, PeerTimeout
from paceline.runtime.work import Work


class Operation:
    """An operation that the test finishes by hand."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._finished.wait(timeout_s):
            raise PeerTimeout("it takes longer")
        if self._error is not None:
            raise self._error

    def error(self) -> Exception | None:
        return self._error


class Memory:
    """Something that can be watched."""


def test_a_result_is_made_once_and_only_after_the_end() -> None:
    operation, made = Operation(), []
    work = Work(operation, lambda: made.append("made") or "result")
    with pytest.raises(PeerTimeout):
        work.wait(0.01)
    assert not work.done() and work.error() is None and made == []
    operation.finish()
    assert work.done() and made == []
    assert work.wait() == "result" and work.wait() == "result"
    assert made == ["made"]


def test_an_error_is_raised_every_time_and_makes_no_result() -> None:
    operation = Operation()
    work = Work(operation, lambda: pytest.fail("there is no result"))
    operation.finish(PeerLost("rank 1 is gone", rank=1))
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            work.wait()
    assert work.done() and work.error().rank == 1


def test_memory_is_kept_until_the_result_was_taken() -> None:
    operation, memory = Operation(), Memory()
    watched = weakref.ref(memory)
    work = Work(operation, lambda: None, memory)
    del memory
    gc.collect()
    assert watched() is not None
    operation.finish()
    work.wait()
    gc.collect()
    assert watched() is None


def test_several_threads_may_wait() -> None:
    operation = Operation()
    work, results = Work(operation, lambda: 5), []
    threads = [threading.Thread(target=lambda: results.append(work.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    operation.finish()
    for thread in threads:
        thread.join(60)
    assert results == [5] * 4
