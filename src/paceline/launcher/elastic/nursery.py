"""The nursery: where newcomers to a job come from.

A place that lacks a process is filled in three steps: a rank is reserved at the coordinator, the
process is started on this host, and its output and its signs of life are watched like anybody's. A
script that crashes before it has joined would be replaced for ever: after a few attempts in a row
its place is given up, with those of its unit.

Threads: used in the launcher's loop only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol

from paceline.launcher.seat import Seat

MAX_FAILED_STARTS = 3
_PAUSE_S = 0.5  # after a failed start, and more after each further one

Place = tuple[int, int]  # whether of a server, and its number


class House(Protocol):
    """What a newcomer needs of the job."""

    async def reserve(self, place: Place) -> int: ...
    async def start(self, seat: Seat) -> None: ...


class Nursery:
    """Makes newcomers."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._on_way: set[Place] = set()  # places for which no rank is reserved yet
        self._failed: Counter[Place] = Counter()  # in a row, by the first place of a unit
        self.unit_size = 1  # workers that come together
        self.is_closed = False

    def may_fill(self, place: Place) -> bool:
        """Say whether a newcomer for this place can be made, and is not being made already."""
        given_up = self._failed[self._first(place)] >= MAX_FAILED_STARTS
        return not (self.is_closed or given_up or place in self._on_way)

    async def fill(self, place: Place) -> None:
        """Make a newcomer for a place; raises LaunchError, and what the coordinator refuses."""
        self._on_way.add(place)
        try:
            await asyncio.sleep(_PAUSE_S * self._failed[self._first(place)])
            rank = await self._house.reserve(place)
        finally:
            self._on_way.discard(place)
        if self.is_closed:
            return
        seat = Seat(rank, place[1], is_server=bool(place[0]), is_newcomer=True)
        await self._house.start(seat)

    def failed(self, place: Place) -> bool:
        """Note that a newcomer ended before it had joined; true when its place is given up."""
        self._failed[self._first(place)] += 1
        return self._failed[self._first(place)] >= MAX_FAILED_STARTS

    def joined(self, place: Place) -> None:
        self._failed.pop(self._first(place), None)

    def _first(self, place: Place) -> Place:
        role, number = place
        return place if role else (role, number - number % self.unit_size)
