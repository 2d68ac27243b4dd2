"""The desk: where operators (the launcher, commands of people) ask the coordinator and watch it.

An operator is authenticated like a member, but is none: it holds no rank, and its end is no loss.
The launcher is the one operator whose word about processes counts: what it sees stopped or running
decides between a starved member and a lost one, until its connection ends.

Threads: everything runs in the coordinator's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.control.client import operator as o
from paceline.control.coordinator.member_connections import Audience
from paceline.control.coordinator.pace_change import PaceChange
from paceline.control.coordinator.state import Record
from paceline.control.membership.decisions import Decision, Remark, Tell, Unwanted, Wanted
from paceline.control.membership.roster import Roster
from paceline.control.transport import messages as m
from paceline.control.transport.auth import Hello
from paceline.control.transport.channel import Channel
from paceline.errors import PacelineError
from paceline.observe.telemetry.events import CoordinatorBack, ServerLoad
from paceline.observe.telemetry.staleness import TableReport
from paceline.observe.telemetry.trace import Spans

_LAST_WORDS_S = 0.2  # a process that has ended is not believed to be lost before this
_MOST_BEHIND_BYTES = 1 << 20  # of events that an onlooker has not read

log = logging.getLogger("paceline.control")
decoder: msgspec.msgpack.Decoder[o.OperatorMessage] = msgspec.msgpack.Decoder(o.OperatorMessage)


class Visitor:
    """One operator's connection."""

    def __init__(self, channel: Channel[o.OperatorMessage], caller: Hello) -> None:
        self.channel, self.caller = channel, caller
        self.is_watching = self.is_launcher = False

    def hears(self, event: Any) -> bool:
        """Say whether an event is passed on. The launcher hears all of them; a trace is much, and
        an onlooker that does not read (its terminal is held) goes without what happens then."""
        is_behind = self.channel.backlog_bytes > _MOST_BEHIND_BYTES
        return self.is_launcher or not (is_behind or isinstance(event, Spans))

    def answer(self, request_id: int, told: int | PacelineError) -> None:
        """Answer with a number, or with what is wrong."""
        if isinstance(told, PacelineError):
            self.tell(m.Failure(request_id, type(told).__name__, str(told)))
        else:
            self.tell(m.Reply(request_id, told))

    def tell(self, message: Any) -> None:
        try:
            self.channel.send(message)
        except PacelineError as error:  # it does not read; its own task sees the closed channel
            log.warning("an operator: %s", error)


class Desk:
    """Serves all operators of a job; `carry_out` is the coordinator's."""

    def __init__(
        self,
        roster: Roster,
        record: Record,
        audience: Audience,
        carry_out: Callable[[Sequence[Decision]], None],
        pace: PaceChange,
    ) -> None:
        self._roster, self._record, self._audience = roster, record, audience
        self._pace = pace
        self._carry_out = carry_out
        self._visitors: set[Visitor] = set()
        self._ends: dict[int, o.Ended] = {}  # by rank: what the launcher saw, not yet believed
        self._reports: dict[tuple[str, int], TableReport] = {}
        self._loads: dict[int, ServerLoad] = {}  # by rank

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
                self._roster.launcher_heard(None)

    def publish(self, decision: Decision | m.Over | m.Changed) -> None:
        """Tell those who watch."""
        if isinstance(decision, Tell):
            self._broadcast(decision.presence)
        elif isinstance(decision, Wanted | Unwanted | Remark | m.Over | m.Changed):
            self._broadcast(decision)

    def happened(self, event: Any) -> None:
        """Tell those who watch what a member reported, or what became of it."""
        if isinstance(event, TableReport):
            self._reports[event.table, event.server] = event
        elif isinstance(event, ServerLoad):
            self._loads[event.rank] = event
        for visitor in self._visitors:
            if visitor.is_watching and visitor.hears(event):
                visitor.tell(o.Happened(event))

    def _broadcast(self, news: o.News) -> None:
        for visitor in self._visitors:
            if visitor.is_watching:
                visitor.tell(news)

    def _on_message(self, visitor: Visitor, message: o.OperatorMessage) -> None:
        roster, now_s = self._roster, time.monotonic()
        if visitor.is_launcher:
            roster.launcher_heard(now_s)
        if isinstance(message, o.Ended):
            self._on_end(message)
        elif isinstance(message, o.Seen):
            roster.seen(message.rank, now_s, stopped_since_s=message.stopped_for_s)
        elif isinstance(message, o.Ask):
            try:
                self._answer(visitor, message, now_s)
            except PacelineError as error:
                visitor.answer(message.id, error)

    def _answer(self, visitor: Visitor, ask: o.Ask, now_s: float) -> None:
        roster = self._roster
        answer: m.Answer = m.Reply(ask.id)
        if isinstance(ask, o.Watch):
            visitor.is_watching, visitor.is_launcher = True, ask.is_launcher
            if ask.is_launcher:
                roster.launcher_heard(now_s)
            for news in (self._status(ask.id), *self._welcome()):
                visitor.tell(news)
            return
        if isinstance(ask, o.SetPace):
            self._pace.wish(ask.pace, ask.id, lambda told: visitor.answer(ask.id, told))
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
            decisions, answer = [], self._status(ask.id)
        self._carry_out(decisions)
        visitor.tell(answer)

    def _on_end(self, end: o.Ended) -> None:
        """Take in that a process has ended; its last words may still be unread."""
        self._ends[end.rank] = end
        grace_s = _LAST_WORDS_S if end.rank in self._audience else 0.0
        asyncio.get_running_loop().call_later(grace_s, self.believe, end.rank)

    def believe(self, rank: int) -> bool:
        """Decide what follows from the end of a process; return whether the launcher saw it."""
        end, roster, now_s = self._ends.pop(rank, None), self._roster, time.monotonic()
        if end is None:
            return False
        if roster.membership is None:
            roster.withdraw(rank)
        elif end.kind is None:  # it left in good order while nobody could hear it say so
            self._carry_out(roster.left(rank, now_s))
        elif end.kind is m.LossKind.BEREFT:  # of a loss that may not be believed yet
            self._carry_out(roster.left(rank, now_s, is_finished=False, is_bereft=True))
        else:
            self._carry_out(roster.lost(rank, end.text, now_s, end.kind))
        return True

    def _status(self, request_id: int) -> o.Status:
        """Say how the job is."""
        roster, state = self._roster, self._roster.state
        ranks = () if roster.membership is None else roster.membership.ranks
        return o.Status(
            request_id,
            policy=roster.policy,
            membership=roster.membership,
            missing=roster.missing,
            wanted=roster.wanted,
            reserved=state.reserved,
            states={r: text for r, text in self._audience.states.items() if r in ranks},
            not_adopted=tuple(one.rank for one in roster.late),
            reports=tuple(self._reports.values()),
            loads=tuple(load for rank, load in self._loads.items() if rank in ranks),
            is_finishing=state.is_finishing,
            over=state.over,
        )

    def _welcome(self) -> Sequence[o.News]:
        """What somebody who begins to watch must know."""
        membership, over = self._roster.membership, self._roster.state.over
        news: list[o.News] = list(self._roster.wanted)
        if self._record.num_replayed:
            generation = 0 if membership is None else membership.generation
            news.append(o.Happened(CoordinatorBack(generation, self._record.num_replayed)))
        return [*news, m.Over(over)] if over else news
