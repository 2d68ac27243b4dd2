"""Starts newcomers: processes that fill open slots of a running job.

The launcher reserves a rank at the coordinator, then starts the process. A script that crashes
before it joins would be replaced for ever: after a few failed starts in a row the slot, with those
of its unit, is given up. So is a slot whose processes cannot be reached by the other members.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from paceline.runtime.process_names import ProcessName

MAX_FAILED_STARTS = 3
_PAUSE_S = 0.5  # after a failed start, and as much more after each further one

Slot = tuple[int, int]  # ProcessName.slot: whether it is a server's, and the number


class Newcomers:
    """Starts processes for open slots, as soon as their predecessors have ended.

    `reserve` returns the rank for a slot; `start` starts a process."""

    def __init__(
        self,
        reserve: Callable[[Slot], Awaitable[int]],
        start: Callable[[ProcessName], Awaitable[None]],
        unit_size: int,
    ) -> None:
        self._reserve, self._start = reserve, start
        self._unit_size = unit_size  # workers that join together
        self._reserving: set[Slot] = set()  # slots for which no rank is reserved yet
        self._failed: Counter[Slot] = Counter()  # in a row, by the first slot of a unit
        self._unreachable: dict[Slot, tuple[int, int]] = {}  # losses in a row, at which step
        self.is_closed = False

    def may_fill(self, slot: Slot) -> bool:
        """Return whether a newcomer may be started for this slot, and none is on its way."""
        num_unreachable = self._unreachable.get(slot, (0, 0))[0]
        is_given_up = max(self._failed[self._first(slot)], num_unreachable) >= MAX_FAILED_STARTS
        return not (self.is_closed or is_given_up or slot in self._reserving)

    async def fill(self, slot: Slot) -> None:
        """Start a newcomer; raises LaunchError, and the error if the coordinator refuses."""
        self._reserving.add(slot)
        try:
            await asyncio.sleep(_PAUSE_S * self._failed[self._first(slot)])
            rank = await self._reserve(slot)
        finally:
            self._reserving.discard(slot)
        if not self.is_closed:
            name = ProcessName(rank, slot[1], is_server=bool(slot[0]), is_newcomer=True)
            await self._start(name)

    def on_failed(self, slot: Slot) -> bool:
        """Count a newcomer that ended before it joined; return whether its slot is given up."""
        self._failed[self._first(slot)] += 1
        return self._failed[self._first(slot)] >= MAX_FAILED_STARTS

    def on_unreachable(self, slot: Slot, step: int) -> bool:
        """Count a member that others could not reach, while the job was at this step; return
        whether its slot is given up: there was no step since the loss of its predecessors."""
        count, before = self._unreachable.get(slot, (0, step))
        self._unreachable[slot] = (count + 1 if step == before else 1, step)
        return self._unreachable[slot][0] >= MAX_FAILED_STARTS

    def forgive(self) -> None:
        """Try slots again that were given up: the job has another host."""
        self._failed.clear()
        self._unreachable.clear()

    def on_joined(self, slot: Slot) -> None:
        self._failed.pop(self._first(slot), None)

    def _first(self, slot: Slot) -> Slot:
        role, number = slot
        return slot if role else (role, number - number % self._unit_size)
