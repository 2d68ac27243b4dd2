"""The nursery: where newcomers to a job come from.

A place that lacks a process is filled in three steps: a rank is reserved at the coordinator, the
process is forked from the template (or started plainly while there is none), and its output and its
signs of life are watched like anybody's. A script that crashes before it has joined would be
replaced for ever: after a few attempts in a row its place is given up, with those of its unit.

Threads: used in the launcher's loop only.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Protocol

from paceline.launcher.elastic.template import Template
from paceline.launcher.outlet import Outlet
from paceline.launcher.process import RankProcess
from paceline.launcher.seat import Seat
from paceline.launcher.spec import RunSpec

MAX_FAILED_STARTS = 3
_PAUSE_S = 0.5  # after a failed start, and more after each further one

Place = tuple[int, int]  # whether of a server, and its number


class House(Protocol):
    """What a newcomer needs of the job."""

    async def reserve(self, place: Place) -> int: ...
    def environ_of(self, seat: Seat) -> dict[str, str]: ...
    def outlet_of(self, seat: Seat) -> Outlet: ...
    def take_in(self, process: RankProcess) -> None: ...


class Nursery:
    """Makes newcomers; `say` shows a line."""

    def __init__(self, spec: RunSpec, house: House, say: Callable[[str], None]) -> None:
        self._spec, self._house = spec, house
        self._say = say
        self._template: Template | None = None
        self._is_warmed = False
        self._on_way: set[Place] = set()  # places for which no rank is reserved yet
        self._failed: Counter[Place] = Counter()  # in a row, by the first place of a unit
        self.unit_size = 1  # workers that come together
        self.is_closed = False

    @property
    def template_pid(self) -> int | None:
        return None if self._template is None else self._template.pid

    def warm_up(self, environ: Mapping[str, str]) -> int | None:
        """Start the template, once; return its pid. Without one, newcomers start plainly."""
        if self._is_warmed:
            return None
        self._is_warmed = True
        try:
            self._template = Template(environ)
        except OSError as error:
            self._say(f"no warm template: {error.strerror}; newcomers will take seconds longer")
            return None
        return self._template.pid

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
        outlet, environ = self._house.outlet_of(seat), self._house.environ_of(seat)
        process = await self._fork(seat, environ, outlet)
        dies = not self._spec.is_detached
        if process is None:
            argv = self._spec.argv(seat)
            process = RankProcess.start(seat, argv, environ, outlet, dies_with_launcher=dies)
        self._house.take_in(process)

    async def _fork(
        self, seat: Seat, environ: dict[str, str], outlet: Outlet
    ) -> RankProcess | None:
        """Fork from the template; None: it has to start plainly."""
        if self._template is None or not await self._template.hurry():
            return None
        dies = not self._spec.is_detached
        process = await self._template.fork(seat, self._spec, environ, outlet, dies=dies)
        if process is None:
            self._say("the warm template is gone; newcomers will take seconds longer")
            self._template.end()
            self._template = None
        return process

    def failed(self, place: Place) -> bool:
        """Note that a newcomer ended before it had joined; true when its place is given up."""
        self._failed[self._first(place)] += 1
        return self._failed[self._first(place)] >= MAX_FAILED_STARTS

    def joined(self, place: Place) -> None:
        self._failed.pop(self._first(place), None)

    def _first(self, place: Place) -> Place:
        role, number = place
        return place if role else (role, number - number % self.unit_size)

    def reap_orphans(self, known: Collection[int | None]) -> None:
        """Reap what ended below us and is nobody's: helpers that a lost process left behind."""
        if self._template is not None and self._template.is_asked:
            return  # one of them may be a newcomer whose pid we are about to learn
        path = f"/proc/self/task/{threading.get_native_id()}/children"
        with suppress(OSError), open(path, encoding="ascii") as children:
            for pid in map(int, children.read().split()):
                if pid not in known:
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        self.is_closed = True
        if self._template is not None:
            self._template.end()
            self._template = None
