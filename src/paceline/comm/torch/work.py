"""Work of torch.distributed: an operation of the engine in flight, and its future.

`wait()` blocks in the engine itself, so an ordinary asynchronous operation needs no Python thread.
A future (DDP creates one per bucket) and a profiler event must end even if no thread waits for the
operation. A background thread, started with the first of them, ends them: it waits inside the
engine for the oldest work and checks all works every few milliseconds, because works of different
groups end in any order. Callbacks of futures run in this thread. A callback may wait for another
work (see `TorchWork.get_future`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work
from torch._C._profiler import _RecordFunctionFast

from paceline import _core
from paceline.comm.tensors import Buffer
from paceline.errors import PacelineError

_NO_TIMEOUT = timedelta(0)  # in torch: wait without a limit
_PAUSE_S = 0.002  # how long the background thread waits for the oldest work between its checks
NOT_TIMED = nullcontext()


class ProfilerEvent:
    """An operation in a profiler's report; starts at once and may end in another thread."""

    def __init__(self, title: str, tensors: list[torch.Tensor]) -> None:
        self._records = [_RecordFunctionFast(f"paceline:{title}", tensors)]
        self._records[0].__enter__()

    def end(self) -> None:
        # `__exit__` does nothing outside of the profiler's thread; destroying the object ends it.
        self._records.clear()


class TorchWork(Work):
    """One or more operations of the engine that torch sees as one. Thread-safe."""

    def __init__(
        self,
        handles: Sequence[_core.Work],
        targets: Sequence[Buffer],
        outputs: list[torch.Tensor],
        keep: object = None,
    ) -> None:
        super().__init__()
        self.waiting: AbstractContextManager[None] = NOT_TIMED
        self._handles = handles
        self._targets = targets  # receive the results
        self._outputs = outputs  # value of `result()` and of the future
        self._keep = keep  # memory that the engine reads until the operation ends
        self._lock = threading.Lock()
        self._is_written = False  # guarded by: _lock
        self._start_of_future: torch.futures.Future[None] | None = None  # guarded by: _lock
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None  # guarded by: _lock
        self._event: ProfilerEvent  # open until the work is completed
        self._event_ended: threading.Event | None = None  # None without a profiler event

    # -- torch's interface --------------------------------------------------------------------

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the result is there; raise the operation's error, or PeerTimeout."""
        with NOT_TIMED if completion_thread.is_current() else self.waiting:
            self._block(timeout)
        self._write_results()
        if self._event_ended is not None and not completion_thread.is_current():
            self._event_ended.wait()  # the caller may read the profiler's report next
        return True

    def _block(self, timeout: timedelta) -> None:
        if timeout == _NO_TIMEOUT:
            for handle in self._handles:
                handle.wait()
        else:
            deadline_s = time.monotonic() + timeout.total_seconds()
            for handle in self._handles:
                handle.wait(max(0.0, deadline_s - time.monotonic()))

    def is_completed(self) -> bool:
        if not self.has_ended():
            return False
        if self.exception() is None:
            self._write_results()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        for handle in self._handles:
            error = handle.error()
            if error is not None:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._handles[0].source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the future that ends with this work; its value is `result()`."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._start_of_future = torch.futures.Future()
            # DDP waits for the future in C++. There an error is an error only if a callback raised
            # it; an exception that Python sets on a future is an ordinary value.
            self._future = future = self._start_of_future.then(lambda _: self.result())
        if completion_thread.is_current():  # in a callback: this thread cannot wait for itself
            while not self.has_ended():
                self.pause(1.0)
        if self.has_ended():
            self._end_future()
        else:
            completion_thread.add(self)
        return future

    # -- for the backend and the completion thread --------------------------------------------

    @property
    def handles(self) -> Sequence[_core.Work]:
        return self._handles

    @property
    def targets(self) -> Sequence[Buffer]:
        return self._targets

    @property
    def outputs(self) -> list[torch.Tensor]:
        return self._outputs

    def trace(self, event: ProfilerEvent) -> None:
        """End the profiler event when the work ends."""
        self._event, self._event_ended = event, threading.Event()
        completion_thread.add(self)

    def has_ended(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def pause(self, timeout_s: float) -> None:
        """Wait until the next operation has ended, at most this long."""
        for handle in self._handles:
            if not handle.done():
                # A timeout, or the operation's error, which `wait()` raises.
                with contextlib.suppress(PacelineError):
                    handle.wait(timeout_s)
                return

    def complete(self) -> None:
        """End the profiler event and the future; called once for each `completion_thread.add`."""
        if self._event_ended is not None and not self._event_ended.is_set():
            self._event.end()
            self._event_ended.set()
        self._end_future()

    def _end_future(self) -> None:
        with self._lock:
            start, self._start_of_future = self._start_of_future, None
        if start is not None:
            start.set_result(None)

    def _write_results(self) -> None:
        if self._is_written:
            return
        with self._lock:
            if not self._is_written:
                for target in self._targets:
                    target.write_back()
                self._keep = None
                self._is_written = True


class DoneWork(Work):
    """The result of an operation that has already ended."""

    def __init__(self, outputs: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.outputs = outputs or []

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self.outputs

    def synchronize(self) -> None:
        """Do nothing: the operation has ended."""

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.outputs)
        return future


class CompletionThread:
    """The background thread that ends futures and profiler events of works. Thread-safe."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._works: list[TorchWork] = []  # guarded by: _changed
        self._is_stopping = False  # guarded by: _changed

    def add(self, work: TorchWork) -> None:
        with self._changed:
            self._works.append(work)
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._run, name="paceline-futures", daemon=True
                )
                self.thread.start()
                # The interpreter must not end while the thread is inside the engine.
                atexit.register(self.stop)
            self._changed.notify()

    def is_current(self) -> bool:
        return threading.current_thread() is self.thread

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
            thread = self.thread
        if thread is not None:
            thread.join(timeout=10 * _PAUSE_S + 1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._works and not self._is_stopping:
                    self._changed.wait()
                if self._is_stopping:
                    return
                works = list(self._works)
            ended = [work for work in works if work.has_ended()]
            if not ended:
                works[0].pause(_PAUSE_S)
                continue
            with self._changed:
                for work in ended:
                    self._works.remove(work)
            for work in ended:
                work.complete()

    def reset_after_fork(self) -> None:
        """Drop the parent's thread and works, which do not exist in a forked child."""
        self.__init__()  # type: ignore[misc]


completion_thread = CompletionThread()
os.register_at_fork(after_in_child=completion_thread.reset_after_fork)
