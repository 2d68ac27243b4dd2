"""The operator: how the launcher, and commands like `paceline scale`, talk to the coordinator.

An operator is authenticated with the job's secret, like a member. It reserves ranks for processes
that will join, reports what became of processes, passes on the user's requests, and receives
notifications (`on_notification`). If the coordinator is restarted, the operator reconnects by
itself and reports again what it knows about processes: the coordinator may have died before it
received the end of one.

Threads: one background thread ("paceline-operator") owns the connection and calls
`on_notification`. All methods may be called from any other thread: `report_*` return at once, the
others block until they are answered, at most `timeout_s`. They raise every PacelineError that the
coordinator answers with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from paceline.control import messages as m
from paceline.control import operator_messages as o
from paceline.control.client.coordinator_connection import (
    ControlClient,
    CoordinatorConnection,
    Identity,
)
from paceline.control.client.requests import ANSWER_S, expect
from paceline.control.membership.state import Reservation
from paceline.control.transport.loop_thread import LoopThread

HOSTS_S = 180.0  # the launcher connects to a new host and checks it
_HEARTBEAT_S = 0.5
_VANISHED_S = 15.0

_decoder: msgspec.msgpack.Decoder[o.ToOperator] = msgspec.msgpack.Decoder(o.ToOperator)


class Operator(ControlClient[o.ToOperator]):
    """One operator's connection; made by `Operator.connect`."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        job_id: str,
        on_notification: Callable[[o.Notification], None] | None,
        is_launcher: bool,
    ) -> None:
        connection = CoordinatorConnection(
            address,
            Identity(secret, job_id, o.ROLE, -1),
            _decoder,
            heartbeat_s=_HEARTBEAT_S,
            vanished_s=_VANISHED_S,
            is_lasting=True,
            name="the launcher" if is_launcher else "this command",
        )
        super().__init__(LoopThread("paceline-operator"), connection)
        self._on_notification, self._is_launcher = on_notification, is_launcher
        self._ended: dict[int, o.Ended] = {}  # by rank: reported again after a restart
        self._seen: dict[int, o.Seen] = {}
        connection.on_message = self._on_message
        connection.greet = self._greeting

    @classmethod
    def connect(
        cls,
        address: str,
        secret: bytes,
        job_id: str,
        *,
        timeout_s: float = ANSWER_S,
        on_notification: Callable[[o.Notification], None] | None = None,
        is_launcher: bool = False,
    ) -> Operator:
        """Connect and authenticate; `on_notification` receives all notifications from now on."""
        operator = cls(address, secret, job_id, on_notification, is_launcher)
        operator._open(timeout_s)
        try:
            if on_notification is not None or is_launcher:
                operator._ask(lambda n: o.Watch(n, is_launcher), timeout_s)
        except BaseException:
            operator.thread.stop()
            raise
        return operator

    def reserve(
        self, role: str, number: int | None = None, timeout_s: float = ANSWER_S
    ) -> Reservation:
        """Reserve a rank and number for a process that will join; RendezvousError if none may."""
        answer = self._ask(lambda n: o.Reserve(n, role, number), timeout_s)
        return expect(answer, o.Placed).place

    def report_end(self, rank: int, text: str, kind: m.LossKind | None) -> None:
        """Report that a process has ended: the kind of its loss, and a text for people.

        `kind` None: it exited cleanly, whether or not it could report that itself.
        """
        self._ended[rank] = o.Ended(rank, text, kind)
        self._seen.pop(rank, None)
        self._send(self._ended[rank])

    def report_running(self, rank: int) -> None:
        """Report that a process runs: if it is silent, it is starved, not lost."""
        self._report_seen(o.Seen(rank))

    def report_stopped(self, rank: int, for_s: float) -> None:
        """Report that a process has been stopped for this long."""
        self._report_seen(o.Seen(rank, for_s))

    def scale(self, workers: int, timeout_s: float = ANSWER_S) -> None:
        """Have that many workers from now on."""
        self._ask(lambda n: o.Scale(n, workers), timeout_s)

    def servers_add(self, count: int, timeout_s: float = ANSWER_S) -> None:
        """Have `count` more servers."""
        self._ask(lambda n: o.AddServers(n, count), timeout_s)

    def servers_remove(self, numbers: Iterable[int], timeout_s: float = ANSWER_S) -> None:
        """Move the partitions of these servers away, then let them leave."""
        those = tuple(numbers)
        self._ask(lambda n: o.RemoveServers(n, those), timeout_s)

    def plan_leave(
        self,
        ranks: Iterable[int],
        *,
        waits: bool = False,
        is_withdrawn: bool = False,
        why: str = "",
        timeout_s: float = ANSWER_S,
    ) -> None:
        """Let members leave whose host goes away, or stay after all; see o.PlanLeave."""
        those = tuple(ranks)
        self._ask(lambda n: o.PlanLeave(n, those, waits, is_withdrawn, why), timeout_s)

    def set_pace(self, pace: str, timeout_s: float = ANSWER_S) -> int:
        """Change the pace of all workers; return the step after which it changes."""
        answer = self._ask(lambda n: o.SetPace(n, pace), timeout_s)
        return int(expect(answer, m.Reply).value or 0)

    def change_hosts(self, action: str, host: str = "", timeout_s: float = HOSTS_S) -> str:
        """Add or remove a host, or list the hosts; return the launcher's answer for people."""
        answer = self._ask(lambda n: o.ChangeHosts(n, action, host), timeout_s)
        return expect(expect(answer, m.Reply).value, bytes).decode(errors="replace")

    def answer_hosts(self, request: int, text: str, error: str = "") -> None:
        """Answer HostsWanted; only the launcher does this. Returns at once."""
        self._send(o.HostsChanged(request, text, error))

    def status(self, timeout_s: float = ANSWER_S) -> o.Status:
        """Return the job as the coordinator sees it."""
        return expect(self._ask(o.AskStatus, timeout_s), o.Status)

    def close(self) -> None:
        """End the connection and the thread. May be called twice."""
        self._leave(m.Leave())
        self.thread.stop()

    def _report_seen(self, seen: o.Seen) -> None:
        self._seen[seen.rank] = seen
        self._send(seen)

    # In the operator's thread.

    def _greeting(self) -> list[Any]:
        if self._on_notification is None and not self._is_launcher:
            return []
        watch = o.Watch(self._connection.next_id(), self._is_launcher)
        return [watch, *self._ended.values(), *self._seen.values()]

    def _on_message(self, message: o.ToOperator) -> None:
        if isinstance(message, m.Answer):
            return  # to the greeting
        if self._on_notification is not None:
            self._on_notification(message)
