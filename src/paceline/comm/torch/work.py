"""What torch.distributed calls a Work: an operation of the engine under way, and its future.

`wait()` blocks in the engine itself, so an ordinary asynchronous operation needs no Python thread.
A future (DDP asks for one per bucket) and a profiler's event must end without anybody waiting:
those works are handed to the background thread of completion.py.
"""

from __future__ import annotations

import contextlib
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
from paceline.comm.torch.completion import settler
from paceline.errors import PacelineError

_NO_TIMEOUT = timedelta(0)  # torch's way of saying "as long as it takes"
NOT_TIMED = nullcontext()


class ProfilerEvent:
    """An operation in a profiler's report; begins at once, and may end in another thread."""

    def __init__(self, title: str, tensors: list[torch.Tensor]) -> None:
        self._records = [_RecordFunctionFast(f"paceline:{title}", tensors)]
        self._records[0].__enter__()

    def end(self) -> None:
        # Its `__exit__` does nothing outside of the profiler's thread; the end of the object does.
        self._records.clear()


class TorchWork(Work):
    """Some operations of the engine, seen by torch as one. Thread-safe."""

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
        self._targets = targets  # where results land
        self._outputs = outputs  # what torch's `result()` and the future hand out
        self._keep = keep  # memory that the engine reads until the operation has ended
        self._lock = threading.Lock()
        self._is_written = False  # guarded by: _lock
        self._start_of_future: torch.futures.Future[None] | None = None  # guarded by: _lock
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None  # guarded by: _lock
        self._event: ProfilerEvent  # open until the work is settled
        self._settled: threading.Event | None = None  # set with the event's end; None without one

    # -- what torch asks ----------------------------------------------------------------------

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the result is there; raises the operation's error, PeerTimeout when late."""
        with NOT_TIMED if settler.is_me() else self.waiting:
            self._block(timeout)
        self._write_results()
        if self._settled is not None and not settler.is_me():
            self._settled.wait()  # so that the profiler's event has ended too
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
            # Only an error that a callback raises is one for C++, where DDP waits; an exception
            # that Python sets on a future would be an ordinary value there.
            self._future = future = self._start_of_future.then(lambda _: self.result())
        if settler.is_me():  # inside a callback: the thread cannot wait for itself
            while not self.has_ended():
                self.pause(1.0)
        if self.has_ended():
            self._end_future()
        else:
            settler.add(self)
        return future

    # -- what the backend and the settling thread ask -----------------------------------------

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
        """End the profiler's event when the work ends."""
        self._event, self._settled = event, threading.Event()
        settler.add(self)

    def has_ended(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def pause(self, timeout_s: float) -> None:
        """Wait for some progress, at most so long."""
        for handle in self._handles:
            if not handle.done():
                # The time was over, or it is the operation's error, which `wait()` raises.
                with contextlib.suppress(PacelineError):
                    handle.wait(timeout_s)
                return

    def settle(self) -> None:
        """End what hangs on this work; called once for each time it was handed to the settler."""
        if self._settled is not None and not self._settled.is_set():
            self._event.end()
            self._settled.set()
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
    """The outcome of an operation that was waited for before it was handed out."""

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
        """It has happened."""

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.outputs)
        return future
