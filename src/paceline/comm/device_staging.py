"""Tensors on a device in the operations of a group: they travel through pinned host memory.

The engine reads and writes host memory. For each tensor on a device an operation gets a
`DeviceBuffer`, pinned memory of the tensor's size:

    source   copied to the host by a side stream, after what the caller's stream has launched; the
             engine starts when the copy is complete
    target   when the engine is done, copied to the device by another side stream; the caller's
             stream waits for the copy, the host does not

A blocking operation waits for its copies itself. An asynchronous one is queued: a thread waits for
the copies, and starts it. The engine has to get the operations of a group in the order of the
calls, so a later call is queued, too, or waits until all that is queued has started.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from paceline.comm.device_route import DeviceRoute, Errand, ErrandThread, mark, naming_errors
from paceline.comm.devices import collective_backend, is_on_device, pinned_like
from paceline.comm.tensors import Buffer, Tensor, code_of, result_buffer
from paceline.errors import PacelineError
from paceline.runtime.console import say
from paceline.runtime.work import Handle


class GroupStaging:
    """The streams and threads of one process for the operations of its groups. Thread-safe.

    Threads: "starts" starts queued operations, in the order of the calls. "copies" waits for copies
    to the device, and then lets their memory go; it is apart so that nothing queued waits for it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._routes: dict[torch.device, DeviceRoute] = {}  # guarded by: _lock
        self._threads: dict[str, ErrandThread] = {}  # by name; guarded by: _lock

    def route_of(self, device: torch.device) -> DeviceRoute:
        """Return the route between a device and the host. Rank 0 says once that there is one."""
        with self._lock:
            route = self._routes.get(device)
            if route is None:
                if self._rank == 0 and not self._routes:
                    say(_statement(device))
                for name in () if self._threads else ("starts", "copies"):
                    self._threads[name] = ErrandThread(name, device)
                route = self._routes[device] = DeviceRoute(device)
            return route

    def naming_errors(self, device: torch.device) -> AbstractContextManager[None]:
        """Name this process and the device in errors of the device."""
        return naming_errors(f"rank {self._rank}", device)

    def queue(self, start: Callable[[], Handle], sources: Sequence[Buffer]) -> QueuedOperation:
        """Start an operation when its sources have arrived, after what was queued before."""

        def begin() -> Handle:
            for source in sources:
                source.arrive()
            return start()

        with self._lock:
            return QueuedOperation(self._threads["starts"].submit(begin))

    def release(self, route: DeviceRoute) -> None:
        """Let go of memory when its copies are complete."""
        with self._lock:
            self._threads["copies"].submit(route.settle)

    def close(self) -> None:
        """Wait for all copies and end the threads. May be called twice."""
        with self._lock:
            threads, self._threads = list(self._threads.values()), {}
            routes, self._routes = list(self._routes.values()), {}
        for thread in threads:
            thread.close()
        for route in routes:
            route.settle()


def _statement(device: torch.device) -> str:
    own = collective_backend(device)
    faster = f"; for {own} call torch.distributed" if own else ""
    return f"operations of groups on tensors of {device.type} go through pinned host memory{faster}"


class DeviceBuffer(Buffer):
    """Pinned host memory in place of a tensor on a device, for one operation."""

    __slots__ = ("_copied", "_on_device", "_staging", "_unused")

    is_late = True

    def __init__(self, tensor: torch.Tensor, staging: GroupStaging, *, is_source: bool) -> None:
        """`is_source`: the operation reads the tensor; its copy to the host is launched now."""
        code_of(tensor)  # the engine has to have its dtype and layout
        self._staging = staging
        # Dropped when it is written: the group may hold this buffer until its next operation.
        self._on_device: torch.Tensor | None = tensor
        route = staging.route_of(tensor.device)
        with staging.naming_errors(tensor.device), torch.no_grad():
            host = pinned_like(tensor, tensor.device)
            if host is None:
                host = torch.empty(tensor.shape, dtype=tensor.dtype)
            source = tensor.resolve_neg().contiguous() if is_source else tensor
            # What the caller's stream has launched may write a source, and may read a target.
            self._unused = mark(tensor.device)
            self._copied = route.to_host(source, host, self._unused) if is_source else None
        super().__init__(host)

    def arrive(self) -> None:
        """Block until the memory has the tensor's values."""
        copied, self._copied = self._copied, None
        if copied is not None:
            with self._staging.naming_errors(copied.device):
                copied.wait_on_host()

    def write_back(self) -> None:
        """Copy the result to the device, once; the current stream of this thread waits for it."""
        target, self._on_device = self._on_device, None
        assert target is not None, "a result is written once"
        route = self._staging.route_of(target.device)
        with self._staging.naming_errors(target.device):
            route.to_device(self._memory, target, self._unused).wait_on_stream()  # type: ignore[arg-type]
        self._staging.release(route)


class QueuedOperation:
    """An operation that starts when its sources have arrived; a Handle (runtime/work.py)."""

    def __init__(self, errand: Errand[Handle]) -> None:
        self._errand = errand

    def has_started(self) -> bool:
        """Return whether the engine has the operation, or it has failed."""
        return self._errand.done()

    def wait_until_started(self) -> None:
        """Block until the engine has the operation, or it has failed."""
        with contextlib.suppress(PacelineError):  # its Work raises the error
            self._errand.wait()

    def done(self) -> bool:
        if not self._errand.done():
            return False
        return self._errand.error() is not None or self._errand.wait().done()

    def wait(self, timeout_s: float | None = None) -> object:
        begin_s = time.monotonic()
        operation = self._errand.wait(timeout_s)
        if timeout_s is not None:
            timeout_s = max(0.0, timeout_s - (time.monotonic() - begin_s))
        return operation.wait(timeout_s)

    def error(self) -> Exception | None:
        if not self._errand.done():
            return None
        return self._errand.error() or self._errand.wait().error()


class OperationQueue:
    """The order of one group's operations, if some of them wait for a device. Thread-safe."""

    def __init__(self, staging: GroupStaging) -> None:
        self._staging = staging
        self._lock = threading.Lock()
        # Queued since `wait_until_started`. Changed with _lock; None says that nothing waits.
        self.last: QueuedOperation | None = None

    def source(self, tensor: Tensor) -> Buffer:
        """Return the host memory of a tensor that an operation reads."""
        if isinstance(tensor, torch.Tensor) and is_on_device(tensor):
            return DeviceBuffer(tensor, self._staging, is_source=True)
        return Buffer(tensor)

    def target(self, tensor: Tensor) -> Buffer:
        """Return the host memory of a tensor that an operation writes."""
        if isinstance(tensor, torch.Tensor) and is_on_device(tensor):
            return DeviceBuffer(tensor, self._staging, is_source=False)
        return result_buffer(tensor)

    def start(self, start: Callable[[], Handle], sources: Sequence[Buffer]) -> Handle:
        """Start an operation: now, or when its sources have arrived and earlier ones have started.
        Never waits."""
        with self._lock:
            if self.last is not None and self.last.has_started():
                self.last = None
            if self.last is not None or any(source.is_late for source in sources):
                self.last = self._staging.queue(start, sources)
                return self.last
        return start()

    def wait_until_started(self) -> None:
        """Block until the engine has everything that is queued."""
        last = self.last
        if last is not None:
            last.wait_until_started()
            with self._lock:
                if self.last is last:
                    self.last = None
