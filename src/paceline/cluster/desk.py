"""The desk: where operators (the launcher, commands of people) ask the coordinator and watch it.

An operator is authenticated like a member, but is none: it holds no rank, and its end is no loss.
The launcher is the one operator whose word about processes counts: what it sees stopped or running
decides between a starved member and a lost one, until its connection ends.

Threads: everything runs in the coordinator's loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from paceline.cluster import messages as m
from paceline.cluster import operator_messages as o
from paceline.cluster.auth import Hello
from paceline.cluster.channel import Channel
from paceline.cluster.decisions import Decision, Remark, Tell, Unwanted, Wanted
from paceline.cluster.roster import Roster
from paceline.errors import PacelineError

log = logging.getLogger("paceline.cluster")
decoder: msgspec.msgpack.Decoder[o.OperatorMessage] = msgspec.msgpack.Decoder(o.OperatorMessage)


class Office(Protocol):
    """What the desk needs of the coordinator behind it."""

    @property
    def roster(self) -> Roster: ...
    def carry_out(self, decisions: Sequence[Decision]) -> None: ...
    def ended(self, rank: int, text: str) -> None: ...
    def status(self, request_id: int) -> o.Status: ...
    def welcome(self) -> Sequence[o.News]: ...


class Visitor:
    """One operator's connection."""

    def __init__(self, channel: Channel[o.OperatorMessage], caller: Hello) -> None:
        self.channel, self.caller = channel, caller
        self.is_watching = self.is_launcher = False

    def tell(self, message: Any) -> None:
        try:
            self.channel.send(message)
        except PacelineError as error:  # it does not read; its own task sees the closed channel
            log.warning("an operator: %s", error)


class Desk:
    """Serves all operators of a job."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._visitors: set[Visitor] = set()

    async def serve(self, channel: Channel[o.OperatorMessage], caller: Hello) -> None:
        """Serve one operator until its connection ends."""
        visitor = Visitor(channel, caller)
        self._visitors.add(visitor)
        try:
            while True:
                message = await channel.receive()
                if isinstance(message, m.Leave):
                    return
                self._on_message(visitor, message)
        except (EOFError, OSError) as error:
            log.debug("an operator's connection ended: %r", error)
        except PacelineError as error:
            log.warning("an operator's connection was ended: %s", error)
        finally:
            self._visitors.discard(visitor)
            channel.close()
            if visitor.is_launcher and not any(one.is_launcher for one in self._visitors):
                self._office.roster.launcher_heard(None)

    def publish(self, decision: Decision | m.Over | m.Changed) -> None:
        """Tell those who watch."""
        if isinstance(decision, Tell):
            self._broadcast(decision.presence)
        elif isinstance(decision, Wanted | Unwanted | Remark | m.Over | m.Changed):
            self._broadcast(decision)

    def happened(self, event: Any) -> None:
        """Tell those who watch what a member reported, or what became of it."""
        self._broadcast(o.Happened(event))

    def _broadcast(self, news: o.News) -> None:
        for visitor in self._visitors:
            if visitor.is_watching:
                visitor.tell(news)

    def _on_message(self, visitor: Visitor, message: o.OperatorMessage) -> None:
        roster, now_s = self._office.roster, time.monotonic()
        if visitor.is_launcher:
            roster.launcher_heard(now_s)
        if isinstance(message, o.Ended):
            self._office.ended(message.rank, message.text)
        elif isinstance(message, o.Seen):
            roster.seen(message.rank, now_s, stopped_since_s=message.stopped_for_s)
        elif isinstance(message, o.Ask):
            try:
                self._answer(visitor, message, now_s)
            except PacelineError as error:
                visitor.tell(m.Failure(message.id, type(error).__name__, str(error)))

    def _answer(self, visitor: Visitor, ask: o.Ask, now_s: float) -> None:
        office, roster = self._office, self._office.roster
        answer: m.Answer = m.Reply(ask.id)
        if isinstance(ask, o.Watch):
            visitor.is_watching, visitor.is_launcher = True, ask.is_launcher
            if ask.is_launcher:
                roster.launcher_heard(now_s)
            visitor.tell(office.status(ask.id))
            for news in office.welcome():
                visitor.tell(news)
            return
        if isinstance(ask, o.Reserve):
            place, decisions = roster.reserve(ask.role, now_s, ask.number, request=ask.id)
            answer = o.Placed(ask.id, place)
        elif isinstance(ask, o.Scale):
            decisions = roster.scale(ask.workers, now_s)
        elif isinstance(ask, o.AddServers):
            decisions = roster.add_servers(ask.count, now_s, request=ask.id)
        elif isinstance(ask, o.RemoveServers):
            decisions = roster.remove_servers(ask.numbers, now_s)
        else:
            assert isinstance(ask, o.AskStatus), ask
            decisions, answer = [], office.status(ask.id)
        office.carry_out(decisions)
        visitor.tell(answer)
