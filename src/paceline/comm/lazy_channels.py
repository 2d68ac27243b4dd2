"""Channels between hosts, opened when a group first needs them.

The engine asks for a channel when an operation has something to send to, or to receive from, a
member on another host (`Engine.take_channel_requests`); what is sent waits in the engine meanwhile.
Either member connects. A member accepts at any time: for a group that it has not formed yet, the
link waits in the listener.

If both connect at once, the link of the lower rank counts: a member that is connecting to a higher
rank answers CROSSED to that rank's call, which then waits for the other link. So there is never
more than one. The higher rank gives the lower one a moment to connect: in a collective both need
the channel.

While a channel is being opened, the membership is checked several times a second. If it cannot be
opened, the group fails, with an error that names both addresses. A member that is busy is waited
for; a member whose address does not answer at all for `liveness_s` counts as unreachable. The lower
rank says so first, so that the two ends of a broken path do not accuse each other.

Threads: everything but `add` runs in the listener's loop; `add` may be called from any other.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline import _core
from paceline.control.member import Member
from paceline.control.transport.link_encryption import CROSSED, Link, LinkKeys
from paceline.control.transport.peer_connections import Crossed, LinkListener
from paceline.control.transport.sockets import connect_tcp
from paceline.errors import ConnectError, GenerationChanged, PacelineError

LANES = ("collective", "point-to-point")  # numbered as in the engine
POINT_TO_POINT = LANES[1:]
_GRACE_S = 0.05  # for a lower rank to connect by itself
_STEP_S = 0.5
_DIAL_S = 5.0  # checking the members must not abort a handshake
_PROBE_S = 1.0
_PURPOSE = re.compile(r"group ([0-9a-f]{1,16}) generation (\d{1,10}) (collective|point-to-point)")

_Name = tuple[int, int]  # id and generation of a group
_End = tuple[int, int]  # rank of the other member, lane


def purpose_of(group_id: int, generation: int, lane: str) -> str:
    """Return the purpose of a link, which both its ends name."""
    return f"group {group_id:x} generation {generation} {lane}"


def for_core(keys: LinkKeys | None) -> tuple[int, bytes, bytes] | None:
    """Return the keys of a link as the engine takes them."""
    return (_core.CIPHERS.index(keys.cipher), keys.send, keys.receive) if keys else None


@dataclass
class LazyGroup:
    """A group whose channels are opened when they are needed."""

    name: _Name
    members: Sequence[Member]
    timeout_s: float
    check: Callable[[Member], bool]  # raises if it cannot be formed; whether the member has left
    core: Callable[[], _core.Group | None] = lambda: None
    dialing: set[_End] = field(default_factory=set)
    opened: set[_End] = field(default_factory=set)  # or about to be
    arrived: dict[_End, asyncio.Event] = field(default_factory=dict)

    def attach(self, end: _End, link: Link) -> None:
        """Give a link to the engine's group, if it still exists."""
        core = self.core()
        if core is None:
            os.close(link.fd)
            return
        ranks = [member.rank for member in self.members]
        core.add_channel(ranks.index(end[0]), end[1], link.fd, for_core(link.keys))
        self.arrived.setdefault(end, asyncio.Event()).set()


class LazyChannels:
    """Opens the channels of this process's groups."""

    def __init__(
        self, me: Member, engine: _core.Engine, listener: LinkListener, liveness_s: float
    ) -> None:
        self._me, self._engine, self._listener = me, engine, listener
        self._liveness_s = liveness_s
        self._groups: dict[_Name, LazyGroup] = {}
        self._admitting: set[tuple[_Name, _End]] = set()  # confirmed to the caller soon
        self._tasks: set[asyncio.Task[None]] = set()
        listener.route(self)
        listener.watch(engine.channel_requests_fd(), self._on_requests)

    def add(self, core: _core.Group, group: LazyGroup) -> None:
        """Open channels for this group from now on, for as long as it exists."""
        name = group.name
        group.core = weakref.ref(core, lambda _: self._drop(group))
        purposes = {purpose_of(*name, lane) for lane in LANES}
        self._listener.call(lambda: self._add(group, purposes))

    def _drop(self, group: LazyGroup) -> None:
        if self._groups.get(group.name) is group:  # not a newer one with its name
            del self._groups[group.name]

    def _add(self, group: LazyGroup, purposes: set[str]) -> None:
        self._groups[group.name] = group
        group.opened.update(end for name, end in self._admitting if name == group.name)
        for rank, purpose, link in self._listener.take_arrived(purposes):
            _, end = _parsed(rank, purpose) or (None, None)
            assert end is not None
            group.opened.add(end)
            group.attach(end, link)

    # -- called by the listener ---------------------------------------------------------------

    def refusal(self, rank: int, purpose: str) -> str:
        """Return why a link is refused; "": it will be taken, or waits until its group exists."""
        parsed = _parsed(rank, purpose)
        if parsed is None:
            return ""
        name, end = parsed
        group = self._groups.get(name)
        if group is None or rank not in [member.rank for member in group.members]:
            self._admitting.add(parsed)
            return ""
        if rank > self._me.rank and (end in group.dialing or end in group.opened):
            return CROSSED
        if end in group.opened:
            return f"rank {rank} is connected to rank {self._me.rank} already for {purpose}"
        group.opened.add(end)
        return ""

    def take(self, rank: int, purpose: str, link: Link | None) -> bool:
        """Give a link that was confirmed to its group; None: its caller has gone. Return whether
        the group exists."""
        parsed = _parsed(rank, purpose)
        if parsed is None:
            return False
        self._admitting.discard(parsed)
        name, end = parsed
        group = self._groups.get(name)
        if group is None or end not in group.opened:
            return False
        if link is None:
            group.opened.discard(end)
        else:
            group.attach(end, link)
        return True

    # -- opening ------------------------------------------------------------------------------

    def _on_requests(self) -> None:
        for group_id, generation, rank, lane in self._engine.take_channel_requests():
            group = self._groups.get((group_id, generation))
            if group is not None:
                task = asyncio.ensure_future(self._open(group, (rank, lane)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _open(self, group: LazyGroup, end: _End) -> None:
        member = next(one for one in group.members if one.rank == end[0])
        arrived = group.arrived.setdefault(end, asyncio.Event())
        began_s = time.monotonic()
        if self._me.rank > member.rank:
            await _wait(arrived, _GRACE_S)
        try:
            while end not in group.opened and group.core() is not None:
                has_left = group.check(member)
                try:
                    if not member.tcp:  # it can only call
                        await _wait(arrived, _STEP_S)
                        if end not in group.opened:
                            raise ConnectError(
                                f"rank {member.rank} ({member.where}) listens at no address that"
                                " other hosts reach, and has not connected"
                            )
                        continue
                    await self._dial(group, member, end, arrived)
                except ConnectError as error:
                    waited_s = time.monotonic() - began_s
                    is_over = has_left or waited_s >= group.timeout_s
                    if is_over or await self._is_unreachable(member, waited_s):
                        raise ConnectError(f"{error} (from {self._me.tcp})") from None
        except Exception as error:  # whatever it is: the group must not wait for ever
            core = group.core()
            if core is not None:
                lost = None if isinstance(error, GenerationChanged) else member.rank
                core.fail(f"rank {self._me.rank}: {error}", lost)
            if not isinstance(error, PacelineError):
                raise

    async def _is_unreachable(self, member: Member, waited_s: float) -> bool:
        """Return whether a member's address has not answered for too long. The kernel answers for
        a process that is stopped or busy: that one is alive, or its heartbeats will be missed."""
        patience_s = self._liveness_s * (1 if self._me.rank < member.rank else 2)
        if waited_s < patience_s or not member.tcp:
            return False
        try:
            sock = await asyncio.wait_for(connect_tcp(member.tcp), _PROBE_S)
        except (OSError, asyncio.TimeoutError):
            return True
        sock.close()
        return False

    async def _dial(
        self, group: LazyGroup, member: Member, end: _End, arrived: asyncio.Event
    ) -> None:
        group.dialing.add(end)
        try:
            purpose = purpose_of(*group.name, LANES[end[1]])
            link = await self._listener.dial(member, purpose, _DIAL_S)
        except Crossed:
            await _wait(arrived, _STEP_S)
            return
        finally:
            group.dialing.discard(end)
        if end in group.opened:
            os.close(link.fd)
            return
        group.opened.add(end)
        group.attach(end, link)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        return


def _parsed(rank: int, purpose: str) -> tuple[_Name, _End] | None:
    found = _PURPOSE.fullmatch(purpose)
    if found is None:
        return None
    group_id, generation, lane = found.groups()
    return (int(group_id, 16), int(generation)), (rank, LANES.index(lane))
