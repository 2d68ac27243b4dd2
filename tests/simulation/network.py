"""Connections as TCP makes them, over links that can be cut.

A CONNECTION has two ENDS, one in each process. What is sent at one end arrives at the other in
order, once, after a delay drawn anew for each message; nothing is said about two connections. When
a connection breaks, what was under way is lost and each end learns of it in its own time, or, if
nothing gets through, not at all: it is HALF-OPEN until it has sent something that nobody
acknowledged for `vanish_s`. Connections that PULSE (those of the engine) send by themselves, so
both of their ends notice after that time.

A LINK leads from one host to another; the way back is another link. While it is cut, what is sent
waits (TCP sends it again) and arrives when the link is healed, if the connection lives so long.
Within a host nothing is ever cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from simulation.process import Process
from simulation.world import World

LOCAL_S = (0.00005, 0.0005)
CONNECT_S = 1.0  # a connection that is not there by then is given up


class Link:
    """One direction between two hosts."""

    def __init__(self) -> None:
        self.is_cut = False
        self.cut_s = 0.0  # since when
        self.delay_s = (0.0001, 0.002)
        self.waiting: list[tuple[End, tuple[str, Any]]] = []


class End:
    """One process' end of a connection."""

    def __init__(self, network: Network, owner: Process, what: str, *, pulses: bool) -> None:
        self.network, self.owner, self.life, self.what = network, owner, owner.life, what
        self.pulses = pulses
        self.peer: End | None = None
        self.is_open = False  # as far as the kernel of this end knows
        self.is_closed = False  # the owner wants nothing more from it
        self.is_severed = False  # nothing that was sent here will ever arrive
        self.arrives_s = 0.0  # when the last thing that was sent here arrives there
        self.num_losses = 0
        self.is_watched = False  # whether missing acknowledgements are watched already

    @property
    def peer_name(self) -> str:
        assert self.peer is not None
        return self.peer.owner.name

    def send(self, message: Any) -> None:
        """Send, if the connection is open as far as this end knows."""
        if self.is_open:
            self.network.carry(self, ("message", message))

    def close(self) -> None:
        """End the connection in good order: what was sent arrives, then the end."""
        self.is_closed = True
        if self.is_open and self.peer is None:
            self.is_open = False
        elif self.is_open:
            self.is_open = False
            self.network.carry(self, ("end", "closed"))
            self._forget()

    def abandon(self, *, is_clean: bool) -> None:
        """The owner is gone; its kernel closes, and may throw away what was not sent yet."""
        if self.is_open and self.peer is not None:
            self.is_open = False
            if not is_clean and self.network.dice.random() < 0.5:
                self.network.lose(self)
            self.network.carry(self, ("end", "reset"))

    def break_off(self, why: str) -> None:
        """This end has learned that the connection is of no use any more."""
        if self.is_open:
            self.is_open = False
            self._forget()
            # Behind what has come before and was not looked at yet.
            self.owner.perform(self.life, self.network.tell_end, (self, why))

    def _forget(self) -> None:
        if self in self.owner.ends:
            self.owner.ends.remove(self)


class Network:
    """All links and connections."""

    def __init__(self, world: World, vanish_s: float = 3.0) -> None:
        self.world, self.vanish_s = world, vanish_s
        self.dice = world.stream("network")
        self.processes: dict[str, Process] = {}
        self.faulty_s = -math.inf  # when something was last cut, healed or broken
        self._links: dict[tuple[str, str], Link] = {}

    def add(self, process: Process) -> None:
        self.processes[process.name] = process

    def link(self, source: str, target: str) -> Link:
        """Return the link from one host to another."""
        if (source, target) not in self._links:
            self._links[source, target] = Link()
        return self._links[source, target]

    # -- connections --------------------------------------------------------------------------

    def connect(self, caller: Process, listener: str, what: str, *, pulses: bool = False) -> End:
        """Ask for a connection; the caller is told of its opening (`on_open`) or end (`on_end`)."""
        end = End(self, caller, what, pulses=pulses)
        end.is_open = True  # so that giving up is told
        self._travel(end, caller.host, self._host(listener), self._knock, end, listener)
        self.world.after(CONNECT_S, self._give_up, end)
        return end

    def _host(self, name: str) -> str:
        return self.processes[name].host

    def _knock(self, end: End, listener: str) -> None:
        process = self.processes[listener]
        if end.life != end.owner.life or not end.is_open:
            return
        back = (end, process.host, end.owner.host)
        if not process.is_alive:
            self._travel(*back, end.break_off, "refused")
            return
        other = End(self, process, end.what, pulses=end.pulses)
        other.peer, end.peer, other.is_open = end, other, True
        process.ends.append(other)
        self.carry(other, ("opened", None))  # ahead of anything that is sent back
        process.perform(process.life, process.on_open, (other,))

    def _opened(self, end: End) -> None:
        assert end.peer is not None
        if end.life != end.owner.life or not end.is_open:
            end.is_open = False
            self._reset(end.peer)
        elif end not in end.owner.ends:
            end.owner.ends.append(end)
            end.owner.perform(end.life, end.owner.on_open, (end,))

    def _give_up(self, end: End) -> None:
        if end not in end.owner.ends and end.is_open:
            end.break_off("no answer")

    # -- what is sent -------------------------------------------------------------------------

    def carry(self, end: End, item: tuple[str, Any]) -> None:
        """Take something from one end to the other, behind what was sent before."""
        assert end.peer is not None
        source, target = end.owner.host, end.peer.owner.host
        if source == target:
            self._schedule(end, item, LOCAL_S)
            return
        there, back = self.link(source, target), self.link(target, source)
        if there.is_cut:
            there.waiting.append((end, item))
        else:
            self._schedule(end, item, there.delay_s)
        if (there.is_cut or back.is_cut) and not end.is_watched:
            end.is_watched = True
            self.world.after(self.vanish_s, self._check, end, there, back, self.world.now_s)

    def _schedule(self, end: End, item: tuple[str, Any], delay_s: tuple[float, float]) -> None:
        arrives_s = max(end.arrives_s + 1e-7, self.world.now_s + self.dice.uniform(*delay_s))
        end.arrives_s = arrives_s
        self.world.after(arrives_s - self.world.now_s, self._arrive, end, item, end.num_losses)

    def lose(self, end: End) -> None:
        """Throw away what was sent here and has not arrived."""
        end.num_losses += 1
        for link in self._links.values():
            link.waiting = [waiting for waiting in link.waiting if waiting[0] is not end]

    def _arrive(self, end: End, item: tuple[str, Any], num_losses: int) -> None:
        peer = end.peer
        assert peer is not None
        if end.is_severed or num_losses != end.num_losses:
            return
        kind, content = item
        if kind == "opened":
            self._opened(peer)
        elif not peer.is_open or peer.life != peer.owner.life:
            if kind == "message" and end.is_open:
                self._travel(end, peer.owner.host, end.owner.host, end.break_off, "reset")
        elif kind == "end":
            peer.break_off(content)
        else:
            peer.owner.perform(peer.life, self._deliver, (peer, content))

    def _deliver(self, end: End, message: Any) -> None:
        if not end.is_closed:
            end.owner.on_message(end, message)

    def tell_end(self, end: End, why: str) -> None:
        """Let a process know that a connection has ended, unless it ended it itself."""
        if not end.is_closed:
            end.owner.on_end(end, why)

    def _check(self, end: End, there: Link, back: Link, since_s: float) -> None:
        """Break an end that has waited too long for acknowledgements."""
        end.is_watched = False
        if any(link.is_cut and link.cut_s <= since_s for link in (there, back)):
            self._reset(end)

    def _reset(self, end: End) -> None:
        """Break one end; the other learns of it if that gets through."""
        if not end.is_open:
            return
        self.lose(end)
        peer = end.peer
        end.break_off("vanished")
        if peer is not None and peer.is_open:
            self._travel(end, end.owner.host, peer.owner.host, peer.break_off, "reset", once=True)
            if peer.pulses:
                self.world.after(self.vanish_s, peer.break_off, "vanished")

    def _travel(
        self, end: End, source: str, target: str, action: Any, *args: Any, once: bool = False
    ) -> None:
        """Carry what is no data (the making and breaking of a connection).

        Over a cut link it waits; `once`: it is not sent again, but lost.
        """
        link = None if source == target else self.link(source, target)
        if link is None or not link.is_cut:
            delay_s = LOCAL_S if link is None else link.delay_s
            self.world.after(self.dice.uniform(*delay_s), action, *args)
        elif not once:
            link.waiting.append((end, ("control", (action, args))))

    # -- what goes wrong ----------------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from one host to another."""
        link = self.link(source, target)
        if not link.is_cut:
            self.faulty_s = self.world.now_s
            link.is_cut, link.cut_s = True, self.world.now_s
            self.world.say("network", "{} -> {} is cut", source, target)
            self.world.after(self.vanish_s, self._check_pulses, source, target, self.world.now_s)

    def _check_pulses(self, source: str, target: str, since_s: float) -> None:
        link = self.link(source, target)
        if not link.is_cut or link.cut_s > since_s:
            return
        for process in self.processes.values():
            for end in list(process.ends):
                hosts = (process.host, end.peer.owner.host if end.peer is not None else "")
                if end.pulses and hosts in ((source, target), (target, source)):
                    self._reset(end)

    def heal(self, source: str, target: str) -> None:
        """Let everything through again: what waits arrives."""
        link = self.link(source, target)
        if not link.is_cut:
            return
        link.is_cut = False
        self.faulty_s = self.world.now_s
        self.world.say("network", "{} -> {} is healed", source, target)
        waiting, link.waiting = link.waiting, []
        for end, item in waiting:
            if item[0] == "control":
                action, args = item[1]
                self.world.after(self.dice.uniform(*link.delay_s), action, *args)
            else:
                self._schedule(end, item, link.delay_s)

    def drop(self, end: End) -> None:
        """Break a connection in the middle: what is under way is lost, both ends learn of it."""
        assert end.peer is not None
        self.faulty_s = self.world.now_s
        self.world.say("network", "{} -- {} breaks", end.owner.name, end.peer.owner.name)
        for one in (end, end.peer):
            one.is_severed = True
            self.world.after(self.dice.uniform(0.0, 0.05), one.break_off, "reset")

    def connections(self) -> Iterator[End]:
        """Name one end of each connection between hosts."""
        for process in self.processes.values():
            for end in process.ends:
                peer = end.peer
                if peer is not None and peer.is_open and end.owner.host < peer.owner.host:
                    yield end
