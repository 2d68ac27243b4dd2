"""The background thread that ends what hangs on works: futures and profiler events.

It exists from the first of them on. It waits inside the engine for the oldest work and looks at all
of them every few milliseconds, because works of different groups end in any order. Callbacks of
futures run in it; one that itself waits for a work is welcome (see `TorchWork.get_future`).
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Protocol

_PAUSE_S = 0.002  # how long the oldest work is watched before all of them are looked at


class Unsettled(Protocol):
    """What the thread needs to know of a work."""

    def has_ended(self) -> bool: ...
    def pause(self, timeout_s: float) -> None: ...  # until it moves, at most so long
    def settle(self) -> None: ...


class Settler:
    """Settles works when they end. Thread-safe."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._works: list[Unsettled] = []  # guarded by: _changed
        self._is_stopping = False  # guarded by: _changed

    def add(self, work: Unsettled) -> None:
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

    def is_me(self) -> bool:
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
                work.settle()

    def _forget(self) -> None:
        """In a forked child: the parent's thread and its works do not exist here."""
        self.__init__()  # type: ignore[misc]


settler = Settler()
os.register_at_fork(after_in_child=settler._forget)
