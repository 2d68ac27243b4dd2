"""The nursery: where processes of an elastic job come from, and where orphans end.

The first ones start as in any job. When they have met, a template is warmed up in the background;
from then on newcomers are forked from it. A script that crashes before it has joined would be
replaced for ever: after a few attempts in a row its place is given up.

Threads: used in the launcher's loop only.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from paceline.launcher.elastic.template import Template
from paceline.launcher.outlet import Outlet
from paceline.launcher.process import RankProcess
from paceline.launcher.seat import Seat
from paceline.launcher.spec import RunSpec

MAX_FAILED_STARTS = 3
_PAUSE_S = 0.5  # after a failed start, and more after each further one


class Nursery:
    """Makes newcomers; `say` shows a line."""

    def __init__(self, spec: RunSpec, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._say = say
        self._template: Template | None = None
        self._failed: Counter[tuple[bool, int]] = Counter()  # in a row, by place

    @property
    def template_pid(self) -> int | None:
        return None if self._template is None else self._template.pid

    def warm_up(self, environ: Mapping[str, str]) -> int | None:
        """Start the template, once; return its pid. Without one, newcomers start plainly."""
        try:
            self._template = Template(environ)
        except OSError as error:
            self._say(f"no warm template: {error.strerror}; newcomers will take seconds longer")
            return None
        return self._template.pid

    async def fork(self, seat: Seat, environ: dict[str, str], outlet: Outlet) -> RankProcess | None:
        """Fork a newcomer; None: it has to start plainly. LaunchError when the machine is full."""
        if self._template is None or not self._template.is_warm:
            return None
        dies = not self._spec.is_detached
        process = await self._template.fork(seat, self._spec, environ, outlet, dies=dies)
        if process is None:
            self._say("the warm template is gone; newcomers will take seconds longer")
            self._template.end()
            self._template = None
        return process

    def pause_s(self, place: tuple[bool, int]) -> float:
        """How long to wait before the next attempt to fill a place."""
        return _PAUSE_S * self._failed[place]

    def failed(self, seat: Seat) -> bool:
        """Note that a newcomer ended before it had joined; true when its place is given up."""
        self._failed[seat.place] += 1
        return self.has_given_up(seat.place)

    def has_given_up(self, place: tuple[bool, int]) -> bool:
        return self._failed[place] >= MAX_FAILED_STARTS

    def joined(self, seat: Seat) -> None:
        self._failed.pop(seat.place, None)

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
        if self._template is not None:
            self._template.end()
            self._template = None
