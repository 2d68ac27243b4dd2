"""Whom to ask for a batch, and what to do when it dies: used by trainers and by later stages.

An order goes to the data worker with the fewest orders of ours; since what is made follows from the
order alone, the choice changes nothing but the speed. (Who reads a stream goes on reading it.) One
that dies, or is stopped for long, is not asked any more: its orders go to the others. When nobody
is left, whoever asked makes the batches.

A data worker may come to its loop long after the others. It says in the coordinator's store that it
is there, and only then a line to it is formed: nobody waits for it here.

Threads: none but the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from paceline import _core
from paceline.comm.fabric import Fabric
from paceline.control.client.rendezvous import AnyAgent
from paceline.control.member import Member
from paceline.control.wait_notice import FIRST_S, WaitNotice
from paceline.data.workers import messages as m
from paceline.data.workers.connection import AskingLine, Incoming, form
from paceline.errors import PacelineError, PeerError, PeerLost
from paceline.runtime.console import say

_MEET_S = 0.02  # how soon one that has come to its loop is seen
_EVERY_S = 30.0


@dataclass(eq=False)
class Pending:
    """An order under way. Without a line: nobody could be asked yet, or nobody is left."""

    order: m.Order
    line: AskingLine | None = None
    incoming: Incoming | None = None

    @property
    def has_come(self) -> bool:
        return self.incoming is not None and self.incoming.work.done()


@dataclass(frozen=True)
class Answer:
    """What came: a reply, who sent it, and the memory with its tensors."""

    reply: m.Reply
    line: AskingLine
    memory: torch.Tensor | None


class Supply:
    """The data workers of one stage, as one asker sees them; `reads`: the first stage."""

    def __init__(
        self, fabric: Fabric, agent: AnyAgent, makers: Sequence[Member], *, reads: bool
    ) -> None:
        self._fabric, self._reads = fabric, reads
        self._lines: list[AskingLine] = []
        self._agent = agent
        self._meeting = {member.rank: member for member in makers}  # who is not there yet
        self._next_look_s = 0.0
        self._pending: list[Pending] = []
        self._abandoned: list[Pending] = []
        self._quiet_until_s = 0.0
        self._turn = fabric.rank  # so that askers do not all begin with the same one

    @property
    def is_empty(self) -> bool:
        """Whether nobody is left, and nobody will come."""
        return not self._lines and not self._meeting

    @property
    def lines(self) -> Sequence[AskingLine]:
        """Those who can be asked."""
        return self._lines

    def ask(self, order: m.Order) -> Pending:
        """Give an order away."""
        self.look()
        pending = Pending(order)
        self._pending.append(pending)
        self._assign(pending)
        return pending

    def look(self) -> None:
        """See who can be asked by now, and give away what waits for it."""
        self._clear_away()
        if self._meeting and time.monotonic() >= self._next_look_s:
            for member in list(self._meeting.values()):
                self._meet(member)
            self._next_look_s = time.monotonic() + _MEET_S
        if self._lines:
            for pending in self._pending:
                if pending.line is None:
                    self._assign(pending)

    def _meet(self, member: Member) -> None:
        """Form a line to a data worker if it is there; give it up if it never will be."""
        presence = self._fabric.presence.get(member.rank)
        try:
            if presence is not None and presence.state in ("left", "lost"):
                raise PeerLost(presence.words, rank=member.rank)
            if not self._agent.store_check([ready_key(member.rank)]):
                return
            group = form(self._fabric, member, self._fabric.me)
        except PeerError as error:
            del self._meeting[member.rank]
            self._say_lost(member, error)
            return
        del self._meeting[member.rank]
        self._lines.append(AskingLine(self._fabric, member, group))

    def take(self, pending: Pending) -> Answer | None:
        """Return the answer that has come; None if it has to be made by another, who was asked."""
        line, incoming = pending.line, pending.incoming
        assert line is not None and incoming is not None
        try:
            incoming.work.wait()
            reply, memory = line.read(incoming)
        except PeerError as error:
            self._lose(line, error)
            return None
        line.outstanding -= 1
        self._pending.remove(pending)
        return Answer(reply, line, memory)

    def wait(self, pending: Pending) -> Answer | None:
        """Wait for the answer; None: nobody is left to make it."""
        notice = WaitNotice("", "the next batch")
        while not self.is_empty:
            start_s = time.monotonic()
            if pending.incoming is None:
                _pause(self._pending)
            elif pending.has_come or _core.wait_any([pending.incoming.work.handle], FIRST_S) >= 0:  # type: ignore[list-item]
                answer = self.take(pending)
                if answer is not None:
                    return answer
            self.look()
            notice.ranks = (pending.line.member.rank,) if pending.line is not None else ()
            notice.check()
            self._mention_wait(time.monotonic() - start_s)
        self._pending.remove(pending)
        return None

    def _mention_wait(self, waited_s: float) -> None:
        """Say that data workers are slow; not for each of their batches."""
        now_s = time.monotonic()
        if waited_s >= FIRST_S and now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _EVERY_S
            say(
                f"rank {self._fabric.rank} waits for its data workers, {len(self._lines)} of which"
                " make batches for it; more of them, or a cheaper dataset, would help"
            )

    def give_up(self, pending: Pending) -> None:
        """Want no answer any more; what comes all the same is let go of."""
        self._abandoned.append(pending)

    def _assign(self, pending: Pending) -> None:
        while (line := self._choose(pending.order)) is not None:

            def make(seq: int, released: tuple[int, ...], room: int) -> m.Order:
                return msgspec.structs.replace(pending.order, seq=seq, released=released, room=room)

            try:
                pending.incoming = line.ask(make)
                pending.line = line
                return
            except PeerError as error:
                self._lose(line, error)

    def _choose(self, order: m.Order) -> AskingLine | None:
        """Find whom to ask; None: nobody is there yet, or any more."""
        if order.stream is None or not self._reads:
            self._turn += 1
            turned = self._lines[self._turn % max(1, len(self._lines)) :] + self._lines
            return min(turned, key=lambda line: line.outstanding, default=None)
        # A stream is read in sequence: all of one trainer's by the same one, if possible.
        there = {line.member.number: line for line in self._lines}
        numbers = sorted([*there, *(member.number for member in self._meeting.values())])
        return there.get(numbers[order.stream[1] % len(numbers)]) if numbers else None

    def _clear_away(self) -> None:
        """Give back the slots of answers that nobody wants."""
        for pending in [one for one in self._abandoned if one.has_come or one.line is None]:
            self._abandoned.remove(pending)
            if pending.line is None:
                self._pending.remove(pending)
            elif self.take(pending) is None:
                self._abandoned.append(pending)

    def _lose(self, line: AskingLine, error: PacelineError) -> None:
        """Ask others for what a data worker has not delivered."""
        if line not in self._lines:
            return
        self._lines.remove(line)
        line.close()
        orphans = [pending for pending in self._pending if pending.line is line]
        for pending in orphans:
            pending.line = pending.incoming = None
            if pending in self._abandoned:
                self._abandoned.remove(pending)
                self._pending.remove(pending)
        orphans = [pending for pending in orphans if pending in self._pending]
        self._say_lost(line.member, error, len(orphans))
        for pending in orphans:
            self._assign(pending)

    def _say_lost(self, member: Member, error: PacelineError, num_orphans: int = 0) -> None:
        left = len(self._lines) + len(self._meeting)
        who = f"data worker {member.number} ({member.where}) is lost"
        if left:
            then = f"{left} left" + (f", who get its {num_orphans} orders" if num_orphans else "")
        else:
            then = "NONE IS LEFT: this process makes its batches itself from now on, more slowly"
        say(f"rank {self._fabric.rank}: {who}: {then} ({type(error).__name__})")


def ready_key(rank: int) -> str:
    """Under which a data worker says that it is there."""
    return f"paceline/data worker {rank}"


def _pause(pending: Sequence[Pending]) -> None:
    """Wait a little for a line to be formed, or for anything else to come."""
    handles: list[Any] = [p.incoming.work.handle for p in pending if p.incoming is not None]
    if handles:
        _core.wait_any(handles, _MEET_S)
    else:
        time.sleep(_MEET_S)
