"""A barrier in shared memory, so that all contenders start their ranks equally together.

A contender's own barrier would mix its speed and its skew into the figure. This one releases the
ranks within a microsecond or two; it yields while it waits, for more ranks than cores is normal.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

_SLOT_WORDS = 8  # one cache line for each rank
_TIMEOUT_S = 120.0


def create(path: Path, world: int) -> None:
    """Make the file that the ranks of one set share."""
    path.write_bytes(bytes(world * _SLOT_WORDS * 8))


class SpinBarrier:
    """One rank's side of it."""

    def __init__(self, path: Path, rank: int, world: int) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self._mine = rank * _SLOT_WORDS
        self._slots = [other * _SLOT_WORDS for other in range(world) if other != rank]
        self._turn = 0

    def arrive(self) -> None:
        """Announce this rank without waiting for the other ranks."""
        self._turn += 1
        self._words[self._mine] = self._turn

    def have_all_arrived(self) -> bool:
        return all(self._words[slot] >= self._turn for slot in self._slots)

    def wait(self) -> None:
        self.arrive()
        turn, words = self._turn, self._words
        give_up_s = time.monotonic() + _TIMEOUT_S
        for slot in self._slots:
            while words[slot] < turn:
                os.sched_yield()
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"a rank did not come to the barrier in {_TIMEOUT_S:.0f} s")
