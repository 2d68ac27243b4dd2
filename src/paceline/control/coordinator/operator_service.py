"""Serves operators: the launcher, and commands such as `paceline scale` and `paceline top`.

An operator is authenticated like a member, but is not one: it has no rank, and its exit is no
loss. The launcher is the one operator whose reports about processes count: whether it sees a
process stopped or running decides between a starved member and a lost one, until its connection
ends.

Threads: everything runs in the coordinator's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.control import messages as m
from paceline.control import operator_messages as o
from paceline.control.coordinator.host_requests import HostRequests
from paceline.control.coordinator.journal import CoordinatorState
from paceline.control.coordinator.member_connections import MemberConnections
from paceline.control.coordinator.pace_change import PaceChange
from paceline.control.membership.roster import Roster
from paceline.control.membership.state import Decision
from paceline.control.transport.auth import Hello
from paceline.control.transport.channel import Channel
from paceline.errors import PacelineError
from paceline.observe.telemetry.events import CoordinatorRestarted, ServerLoad
from paceline.observe.telemetry.staleness import TableReport
from paceline.observe.telemetry.trace import Spans

_LAST_MESSAGES_S = 0.2  # how long the last messages of a process that has ended may take
_MAX_BACKLOG_BYTES = 1 << 20  # of events that a watching operator has not read

log = logging.getLogger("paceline.control")
decoder: msgspec.msgpack.Decoder[o.OperatorMessage] = msgspec.msgpack.Decoder(o.OperatorMessage)


class OperatorConnection:
    """One operator's connection."""

    def __init__(self, channel: Channel[o.OperatorMessage], caller: Hello) -> None:
        self.channel, self.caller = channel, caller
        self.is_watching = self.is_launcher = False

    def accepts(self, event: Any) -> bool:
        """Return whether an event is sent. The launcher receives all events. Other operators
        receive no traces, which are large, and no events while they do not read (a suspended
        terminal)."""
        is_lagging = self.channel.backlog_bytes > _MAX_BACKLOG_BYTES
        return self.is_launcher or not (is_lagging or isinstance(event, Spans))

    def answer(self, request_id: int, value: int | bytes | PacelineError) -> None:
        """Answer with a number, a text or an error."""
        if isinstance(value, PacelineError):
            self.send(m.Failure(request_id, type(value).__name__, str(value)))
        else:
            self.send(m.Reply(request_id, value))

    def send(self, message: Any) -> None:
        try:
            self.channel.send(message)
        except PacelineError as error:  # it does not read; its own task sees the closed channel
            log.warning("an operator: %s", error)


class OperatorService:
    """Serves all operators of a job; `carry_out` is the coordinator's."""

    def __init__(
        self,
        roster: Roster,
        state: CoordinatorState,
        members: MemberConnections,
        carry_out: Callable[[Sequence[Decision]], None],
        pace: PaceChange,
    ) -> None:
        self._roster, self._state, self._members = roster, state, members
        self._pace = pace
        self._carry_out = carry_out
        self._operators: set[OperatorConnection] = set()
        self._host_requests: HostRequests[OperatorConnection] = HostRequests()
        self._ends: dict[int, o.Ended] = {}  # by rank: reported by the launcher, not yet applied
        self._reports: dict[tuple[str, int], TableReport] = {}
        self._loads: dict[int, ServerLoad] = {}  # by rank

    async def serve(self, channel: Channel[o.OperatorMessage], caller: Hello) -> None:
        """Serve one operator until its connection ends."""
        operator = OperatorConnection(channel, caller)
        self._operators.add(operator)
        try:
            while True:
                message = await channel.receive()
                if isinstance(message, m.Leave):
                    return
                self._on_message(operator, message)
        except (EOFError, OSError) as error:
            log.debug("an operator's connection ended: %r", error)
        except PacelineError as error:
            log.warning("an operator's connection was closed: %s", error)
        finally:
            self._operators.discard(operator)
            channel.close()
            self._host_requests.on_end(operator)
            if operator.is_launcher and not any(one.is_launcher for one in self._operators):
                self._roster.launcher_heard(None)

    def publish(self, notification: o.Notification) -> None:
        """Send a notification to all watching operators."""
        for operator in self._operators:
            if operator.is_watching:
                operator.send(notification)

    def publish_event(self, event: Any) -> None:
        """Send an event to all watching operators: a member's report, or a change of membership."""
        if isinstance(event, TableReport):
            self._reports[event.table, event.server] = event
        elif isinstance(event, ServerLoad):
            self._loads[event.rank] = event
        for operator in self._operators:
            if operator.is_watching and operator.accepts(event):
                operator.send(o.Happened(event))

    def _on_message(self, operator: OperatorConnection, message: o.OperatorMessage) -> None:
        roster, now_s = self._roster, time.monotonic()
        if operator.is_launcher:
            roster.launcher_heard(now_s)
        if isinstance(message, o.Ended):
            self._on_end(message)
        elif isinstance(message, o.Seen):
            roster.seen(message.rank, now_s, stopped_since_s=message.stopped_for_s)
        elif isinstance(message, o.HostsChanged):
            self._host_requests.on_answer(operator, message)
        elif isinstance(message, o.Ask):
            try:
                self._answer(operator, message, now_s)
            except PacelineError as error:
                operator.answer(message.id, error)

    def _answer(self, operator: OperatorConnection, ask: o.Ask, now_s: float) -> None:
        roster = self._roster
        answer: m.Answer = m.Reply(ask.id)
        if isinstance(ask, o.Watch):
            operator.is_watching, operator.is_launcher = True, ask.is_launcher
            if ask.is_launcher:
                roster.launcher_heard(now_s)
            for message in (self._status(ask.id), *self._first_notifications()):
                operator.send(message)
            return
        if isinstance(ask, o.SetPace):
            self._pace.request(ask.pace, ask.id, lambda value: operator.answer(ask.id, value))
            return
        if isinstance(ask, o.ChangeHosts):
            self._host_requests.pass_on(ask, operator, self._operators, roster.policy.is_elastic)
            return
        if isinstance(ask, o.Reserve):
            reserved, decisions = roster.reserve(ask.role, now_s, ask.number, request=ask.id)
            answer = o.Placed(ask.id, reserved)
        elif isinstance(ask, o.Scale):
            decisions = roster.scale(ask.workers, now_s)
        elif isinstance(ask, o.AddServers):
            decisions = roster.add_servers(ask.count, now_s, request=ask.id)
        elif isinstance(ask, o.RemoveServers):
            decisions = roster.remove_servers(ask.numbers, now_s)
        elif isinstance(ask, o.PlanLeave) and ask.is_withdrawn:
            decisions = roster.withdraw_leave(ask.ranks, now_s)
        elif isinstance(ask, o.PlanLeave):
            decisions = roster.plan_leave(ask.ranks, now_s, waits=ask.waits, why=ask.why)
        else:
            assert isinstance(ask, o.AskStatus), ask
            decisions, answer = [], self._status(ask.id)
        self._carry_out(decisions)
        operator.send(answer)

    def _on_end(self, end: o.Ended) -> None:
        """Note that a process has ended; its last messages may still be unread."""
        self._ends[end.rank] = end
        grace_s = _LAST_MESSAGES_S if end.rank in self._members else 0.0
        asyncio.get_running_loop().call_later(grace_s, self.apply_end, end.rank)

    def apply_end(self, rank: int) -> bool:
        """Carry out what follows from the end of a process; return whether the launcher saw it."""
        end, roster, now_s = self._ends.pop(rank, None), self._roster, time.monotonic()
        if end is None:
            return False
        if roster.membership is None:
            roster.withdraw(rank)
        elif end.kind is None:  # it exited cleanly while no coordinator received its Leave
            self._carry_out(roster.left(rank, now_s))
        elif end.kind is m.LossKind.LOST_PEER:  # the loss that caused it may not be known yet
            self._carry_out(roster.left(rank, now_s, is_finished=False, has_lost_peer=True))
        else:
            self._carry_out(roster.lost(rank, end.text, now_s, end.kind))
        return True

    def _status(self, request_id: int) -> o.Status:
        roster, state = self._roster, self._roster.state
        ranks = () if roster.membership is None else roster.membership.ranks
        return o.Status(
            request_id,
            policy=roster.policy,
            membership=roster.membership,
            missing=roster.missing,
            wanted=roster.wanted,
            reserved=state.reserved,
            states={r: text for r, text in self._members.states.items() if r in ranks},
            not_adopted=tuple(one.rank for one in roster.late),
            reports=tuple(self._reports.values()),
            loads=tuple(load for rank, load in self._loads.items() if rank in ranks),
            is_finishing=state.is_finishing,
            over=state.over,
            num_workers=len(state.workers),
            num_servers=len(state.servers),
            leaving=tuple(one.rank for one in state.leaving),
        )

    def _first_notifications(self) -> Sequence[o.Notification]:
        """Return what an operator that begins to watch must know."""
        membership, over = self._roster.membership, self._roster.state.over
        found: list[o.Notification] = list(self._roster.wanted)
        if self._state.num_replayed:
            generation = 0 if membership is None else membership.generation
            found.append(o.Happened(CoordinatorRestarted(generation, self._state.num_replayed)))
        return [*found, m.Over(over)] if over else found
