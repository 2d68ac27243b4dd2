"""Forms connections to other processes in helper threads, so that a slow one delays no other.

Connections to one process are formed one after the other. One whose other end may never be formed
must not hold up the rest, so it is begun only when it is ready.

Threads: one for each process, while connections to it are formed; the loop submits and collects.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from paceline.errors import PacelineError

Formed = TypeVar("Formed")


class Connector(Generic[Formed]):
    """Connections that are being formed, by the key that the loop has for each."""

    def __init__(self) -> None:
        self._mu = threading.Lock()
        self._unready: dict[
            Hashable, tuple[int, Callable[[], Formed | None], Callable[[], bool]]
        ] = {}  # rank, form, is_ready; of the loop only
        self._queues: dict[int, deque[tuple[Hashable, Callable[[], Formed | None]]]] = {}  # by rank
        self._ready: deque[tuple[Hashable, Formed | None | PacelineError]] = deque()

    def arrange(self, rank: int, key: Hashable, form: Callable[[], Formed | None]) -> None:
        """Form a connection to a process, or only link it; for one process one after the other."""
        with self._mu:
            queue = self._queues.get(rank)
            if queue is not None:
                queue.append((key, form))
                return
            queue = self._queues[rank] = deque([(key, form)])
        name = f"paceline-meet-{rank}"
        threading.Thread(target=self._meet, args=(rank, queue), name=name, daemon=True).start()

    def arrange_when(
        self,
        rank: int,
        key: Hashable,
        form: Callable[[], Formed | None],
        is_ready: Callable[[], bool],
    ) -> None:
        """Form a connection as `arrange` does, as soon as `is_ready` returns true."""
        self._unready[key] = (rank, form, is_ready)
        self._begin_ready()

    def withdraw(self, is_meant: Callable[[Hashable], bool]) -> None:
        """Forget connections that were not ready yet."""
        for key in [key for key in self._unready if is_meant(key)]:
            del self._unready[key]

    def _begin_ready(self) -> None:
        for key, (rank, form, is_ready) in list(self._unready.items()):
            if is_ready():
                del self._unready[key]
                self.arrange(rank, key, form)

    def take(self) -> list[tuple[Hashable, Formed | None | PacelineError]]:
        """Return what has been formed since the last time, or why it could not be."""
        self._begin_ready()
        taken = []
        while self._ready:
            taken.append(self._ready.popleft())
        return taken

    def _meet(self, rank: int, queue: deque[tuple[Hashable, Callable[[], Formed | None]]]) -> None:
        while True:
            with self._mu:
                if not queue:
                    del self._queues[rank]
                    return
                key, form = queue.popleft()
            try:
                self._ready.append((key, form()))
            except (
                PacelineError,
                KeyError,
            ) as error:  # KeyError: the process is no member any more
                known = error if isinstance(error, PacelineError) else PacelineError(str(error))
                self._ready.append((key, known))
