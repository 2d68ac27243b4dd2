"""Copies between a device and host memory, ordered by events, without a synchronisation.

A device works off its streams while the host is ahead. So a tensor's values do not exist yet when
the host handles it, and its memory may still be read when the host drops it. Three rules:

    order   a copy runs on a stream of the route, after an EVENT that the stream which wrote the
            source has recorded; the stream that reads the result waits for the event of the copy
    hold    a copy holds both tensors until its event has completed: a freed block would be reused
    wait    host memory may be read, written or sent only after a host thread has waited for the
            copy. Only ERRAND threads do that. The thread of the script and the threads of autograd
            never wait for the device; they wait at most for an errand.

         script's stream       ... backward ─┬─ event ─────────────────────┬─ optimizer ...
         outward stream                      └► copy to the host ─ event   │
         errand thread "out"                              wait ─► exchange │
         errand thread "in"                                       wait ──► launch
         inward stream                                            copy to the device ─ event

There are two streams because devices copy in both directions at the same time.

"Current stream" is a property of a thread. An errand thread has another one than the script, so it
gets an event that the script's thread recorded (`mark`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from paceline.errors import DeviceError, PacelineError, PeerTimeout

Result = TypeVar("Result")


def mark(device: torch.device) -> torch.Event:
    """Record an event on this thread's current stream: all work that was launched until now."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


@contextmanager
def naming_errors(who: str, device: torch.device) -> Iterator[None]:
    """Name the process and the device in errors of the device."""
    try:
        yield
    except PacelineError:
        raise
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise DeviceError(
            f"{who}: {device} failed: {first_line}. Look at the device (its driver's log, its"
            " memory), and start again from a checkpoint"
        ) from error


class Copied:
    """A copy that was launched. Holds its memory."""

    __slots__ = ("_begun", "_done", "_memory", "device")

    def __init__(
        self, device: torch.device, begun: torch.Event, done: torch.Event, memory: object
    ) -> None:
        self.device, self._begun, self._done, self._memory = device, begun, done, memory

    def done(self) -> bool:
        """Return whether the copy is complete. Never waits."""
        return self._done.query()

    @property
    def took_ms(self) -> float:
        """How long the device copied; for a copy that is complete."""
        return self._begun.elapsed_time(self._done)

    def wait_on_stream(self) -> None:
        """Let the current stream of this thread wait for the copy; the host goes on."""
        torch.accelerator.current_stream(self.device).wait_event(self._done)

    def wait_on_host(self) -> None:
        """Block this thread until the copy is complete. For errand threads only."""
        self._done.synchronize()


class DeviceRoute:
    """The streams between one device and host memory. Callable from any thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._outward, self._inward = torch.Stream(device), torch.Stream(device)
        self._lock = threading.Lock()
        self._in_flight: deque[Copied] = deque()  # guarded by: _lock
        self.copied_ms = 0.0  # time of all complete copies that were looked at

    def to_host(
        self, source: torch.Tensor, host: torch.Tensor, after: torch.Event | None = None
    ) -> Copied:
        """Copy to pinned host memory, after an event (default: what this thread has launched)."""
        return self._copy(self._outward, [(host, source)], after or mark(self.device))

    def to_host_together(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Copied:
        """Copy many tensors (source, host) as one: one event before them, and one after them."""
        turned = [(host, source) for source, host in pairs]
        return self._copy(self._outward, turned, mark(self.device))

    def to_device(
        self, host: torch.Tensor, target: torch.Tensor, after: torch.Event | None = None
    ) -> Copied:
        """Copy from pinned host memory, after an event (default: what this thread has launched).

        The event covers everything that still reads or writes the target.
        """
        return self._copy(self._inward, [(target, host)], after or mark(self.device))

    def _copy(
        self,
        stream: torch.Stream,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],  # target, source
        after: torch.Event,
    ) -> Copied:
        stream.wait_event(after)
        begun = torch.Event(self.device, enable_timing=True)
        # A thread that waits for it sleeps.
        done = torch.Event(self.device, enable_timing=True, blocking=True)
        with stream, torch.no_grad():
            begun.record(stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(stream)
        copied = Copied(self.device, begun, done, pairs)
        with self._lock:
            while self._in_flight and self._in_flight[0].done():
                self.copied_ms += self._in_flight.popleft().took_ms
            self._in_flight.append(copied)
        return copied

    def settle(self) -> None:
        """Block until no copy is in flight; before host memory is unregistered or freed."""
        with self._lock:
            copies = list(self._in_flight)
            self._in_flight.clear()
        for copied in copies:
            copied.wait_on_host()


class Errand(Generic[Result]):
    """Something that an errand thread does; a Handle (runtime/work.py)."""

    def __init__(self, action: Callable[[], Result]) -> None:
        self._action: Callable[[], Result] | None = action
        self._ended = threading.Event()
        self._result: list[Result] = []
        self._error: Exception | None = None

    def run(self) -> None:
        """Do it; called by the errand thread."""
        action, self._action = self._action, None
        assert action is not None, "an errand is done once"
        try:
            self._result.append(action())
        except Exception as error:  # raised again by wait()
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> Result:
        """Block until it is done; return its result or raise its error."""
        if not self._ended.wait(timeout_s):
            raise PeerTimeout(f"a copy or exchange took longer than {timeout_s} s")
        if self._error is not None:
            raise self._error
        return self._result[0]

    def error(self) -> Exception | None:
        return self._error


class ErrandThread:
    """A host thread that may wait for the device and for other workers. Errands run in order."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._queue: queue.SimpleQueue[Errand[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"paceline {name}", daemon=True)
        self._thread.start()

    def submit(self, action: Callable[[], Result]) -> Errand[Result]:
        """Let the thread call this after what was submitted before."""
        errand = Errand(action)
        self._queue.put(errand)
        return errand

    def close(self) -> None:
        """End the thread after what was submitted."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.accelerator.set_device_index(self._device.index)
        while (errand := self._queue.get()) is not None:
            errand.run()
            del errand  # and the memory that it holds
