"""A process of the simulated world: what the operating system can do to it.

It may CRASH (whatever it knew is gone, its peers' connections end), be started again (another
LIFE), be STOPPED and continue (what comes meanwhile waits in its sockets, its timers are late), be
STARVED (the same, but the operating system still says that it runs), or be SLOW (each thing it does
takes time, in order).

Subclasses say what it does: `on_start`, `on_open`, `on_message`, `on_end`, and timers (`after`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.world import World

if TYPE_CHECKING:
    from simulation.network import End, Network


class Process:
    """One process. `name` is its address; processes of one host are never cut from each other."""

    def __init__(self, world: World, network: Network, name: str, host: str) -> None:
        self.world, self.network = world, network
        self.name, self.host = name, host
        self.life = 0  # how many times it was started
        self.state = "off"  # "off", "running", "stopped", "starved"
        self.lag_s = 0.0  # how long everything takes it
        self.ends: list[End] = []  # of its connections
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.last_pause_s = 0.0  # how long the last pause was that has ended
        self._pause_s = 0.0
        self._free_s = 0.0  # when it is done with what it has begun
        self.paused_s = -math.inf  # when it was last stopped or starved, and did not do anything
        self.on_exit: Callable[[Process, str], None] | None = None  # its parent is told
        network.add(self)

    @property
    def is_alive(self) -> bool:
        return self.state != "off"

    @property
    def paused_for_s(self) -> float:
        """How long it has been stopped or starved."""
        return self.world.now_s - self._pause_s if self.state in ("stopped", "starved") else 0.0

    # -- what is done to it -------------------------------------------------------------------

    def start(self) -> None:
        """Begin a life."""
        assert self.state == "off", f"{self.name} is started twice"
        self.state = "running"
        self.life += 1
        self._free_s = self.world.now_s
        self.world.say(self.name, "starts" if self.life == 1 else "starts again")
        self.on_start()

    def crash(self, why: str = "killed by signal 9") -> None:
        """End this life at once."""
        if self.state != "off":
            self._end(why, is_clean=False)

    def exit(self, why: str) -> None:
        """End this life by itself: what was sent still arrives."""
        self._end(why, is_clean=True)

    def _end(self, why: str, *, is_clean: bool) -> None:
        self.world.say(self.name, "ends: {}", why)
        self.state, self.lag_s = "off", 0.0
        self._backlog.clear()
        ends, self.ends = self.ends, []
        for end in ends:
            end.abandon(is_clean=is_clean)
        self.on_crash()
        if self.on_exit is not None:
            self.on_exit(self, why)

    def pause(self, state: str = "stopped") -> None:
        """Do nothing from now on: "stopped" (SIGSTOP), or "starved" (no turn at the processor)."""
        if self.state == "running":
            self.state = state
            self._pause_s = self.paused_s = self.world.now_s
            self.world.say(self.name, "is {}", state)

    def resume(self) -> None:
        """Go on with whatever has come meanwhile."""
        if self.state in ("stopped", "starved"):
            self.world.say(self.name, "continues, with {} things to do", len(self._backlog))
            self.state = "running"
            self.last_pause_s = self.world.now_s - self._pause_s
            self.paused_s = self.world.now_s
            self._drain()

    # -- what it does -------------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do something later, in this life."""
        self.world.after(delay_s, self.perform, self.life, action, args)

    def perform(self, life: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Have it do something: now, or when it has its turn."""
        if life != self.life or self.state == "off":
            return
        if self.state != "running" or self._backlog:
            self._backlog.append((action, args))
        elif self.lag_s or self._free_s > self.world.now_s:
            self._free_s = max(self._free_s, self.world.now_s) + self.lag_s
            delay_s = self._free_s - self.world.now_s
            self.world.after(delay_s, self._perform_late, life, action, args)
        else:
            action(*args)

    def _perform_late(self, life: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if life != self.life or self.state == "off":
            return
        if self.state == "running" and not self._backlog:
            action(*args)
        else:
            self._backlog.append((action, args))

    def _drain(self) -> None:
        while self._backlog and self.state == "running":
            action, args = self._backlog.popleft()
            action(*args)

    # -- for subclasses -----------------------------------------------------------------------

    def on_start(self) -> None:
        """Begin: everything that is known now was read from disk."""

    def on_crash(self) -> None:
        """Forget what only lives in memory."""

    def on_open(self, end: End) -> None:
        """A connection is there: asked for by this process, or accepted."""

    def on_message(self, end: End, message: Any) -> None:
        """Something has come."""

    def on_end(self, end: End, why: str) -> None:
        """A connection has ended, or could not be made."""
