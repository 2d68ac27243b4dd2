"""The operator: how the launcher, and commands like `paceline scale`, speak with the coordinator.

An operator is authenticated with the job's secret, like a member. It asks for ranks of processes
that will come, tells what became of processes, passes on people's wishes, and hears what happens
(`on_news`). When the coordinator is restarted it comes back by itself and tells again what it knows
about processes: the coordinator may have died before it heard of an end.

Threads: one background thread ("paceline-operator") owns the connection and calls `on_news`. All
methods may be called from any other thread: `report_*` return at once, the others block until they
are answered, at most `timeout_s`. Every PacelineError that the coordinator answers with is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from paceline import errors
from paceline.cluster import messages as m
from paceline.cluster import operator_messages as o
from paceline.cluster.contact import Contact, Identity
from paceline.cluster.decisions import Place
from paceline.cluster.loop_thread import LoopThread
from paceline.cluster.store_calls import expect

ANSWER_S = 10.0
_HEARTBEAT_S = 0.5
_VANISHED_S = 15.0

_decoder: msgspec.msgpack.Decoder[o.ToOperator] = msgspec.msgpack.Decoder(o.ToOperator)


class Operator:
    """One operator's connection; made by `Operator.connect`."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        job_id: str,
        on_news: Callable[[o.News], None] | None,
        is_launcher: bool,
    ) -> None:
        self._thread = LoopThread("paceline-operator")
        self._on_news, self._is_launcher = on_news, is_launcher
        self._ended: dict[int, o.Ended] = {}  # by rank: told again to a coordinator that is back
        self._seen: dict[int, o.Seen] = {}
        self._contact: Contact[o.ToOperator] = Contact(
            address,
            Identity(secret, job_id, o.ROLE, -1),
            _decoder,
            heartbeat_s=_HEARTBEAT_S,
            vanished_s=_VANISHED_S,
            is_lasting=True,
            name="the launcher" if is_launcher else "this command",
        )
        self._contact.on_message = self._on_message
        self._contact.greet = self._greeting

    @classmethod
    def connect(
        cls,
        address: str,
        secret: bytes,
        job_id: str,
        *,
        timeout_s: float = ANSWER_S,
        on_news: Callable[[o.News], None] | None = None,
        is_launcher: bool = False,
    ) -> Operator:
        """Connect and authenticate; `on_news` hears everything from now on."""
        operator = cls(address, secret, job_id, on_news, is_launcher)
        try:
            operator._thread.call(operator._contact.open(timeout_s))
            if on_news is not None or is_launcher:
                operator._ask(lambda n: o.Watch(n, is_launcher), timeout_s)
        except BaseException:
            operator._thread.stop()
            raise
        return operator

    @property
    def is_attached(self) -> bool:
        """Say whether the coordinator can be spoken with right now."""
        return self._contact.is_attached

    @property
    def unreachable_s(self) -> float:
        """For how long it could not; 0 when it can."""
        return self._contact.unreachable_s

    def reserve(self, role: str, number: int | None = None, timeout_s: float = ANSWER_S) -> Place:
        """Return the rank and number for a process that will come; RendezvousError if none may."""
        answer = self._ask(lambda n: o.Reserve(n, role, number), timeout_s)
        return expect(answer, o.Placed).place

    def report_end(self, rank: int, text: str, kind: m.LossKind | None) -> None:
        """Report that a process has ended, and how: by its kind, and in words for people.

        `kind` None: it has ended in good order, whether or not it could say so itself.
        """
        self._ended[rank] = o.Ended(rank, text, kind)
        self._seen.pop(rank, None)
        self._thread.post(self._contact.tell, self._ended[rank])

    def report_running(self, rank: int) -> None:
        """Tell that a process runs: if it is silent, it is starved, not lost."""
        self._report_seen(o.Seen(rank))

    def report_stopped(self, rank: int, for_s: float) -> None:
        """Tell that a process has been stopped for so long."""
        self._report_seen(o.Seen(rank, for_s))

    def scale(self, workers: int, timeout_s: float = ANSWER_S) -> None:
        """Have that many workers from now on."""
        self._ask(lambda n: o.Scale(n, workers), timeout_s)

    def servers_add(self, count: int, timeout_s: float = ANSWER_S) -> None:
        """Have so many more servers."""
        self._ask(lambda n: o.AddServers(n, count), timeout_s)

    def servers_remove(self, numbers: Iterable[int], timeout_s: float = ANSWER_S) -> None:
        """Empty these servers, and let them go."""
        those = tuple(numbers)
        self._ask(lambda n: o.RemoveServers(n, those), timeout_s)

    def set_pace(self, pace: str, timeout_s: float = ANSWER_S) -> int:
        """Change the pace of all workers; return the step behind which they do."""
        answer = self._ask(lambda n: o.SetPace(n, pace), timeout_s)
        return int(expect(answer, m.Reply).value or 0)

    def status(self, timeout_s: float = ANSWER_S) -> o.Status:
        """Return how the job is."""
        return expect(self._ask(o.AskStatus, timeout_s), o.Status)

    def close(self) -> None:
        """End the connection and the thread. May be called twice."""
        if self._thread.is_running and self._contact.gone is None:
            self._thread.call(self._contact.leave(m.Leave()))
        self._thread.stop()

    def _report_seen(self, seen: o.Seen) -> None:
        self._seen[seen.rank] = seen
        self._thread.post(self._contact.tell, seen)

    def _ask(self, make: Callable[[int], Any], timeout_s: float) -> m.Answer:
        answer = self._thread.call(self._contact.ask(make, timeout_s))
        if isinstance(answer, m.Failure):
            raise errors.named(answer.error, answer.text)
        return answer

    # In the operator's thread.

    def _greeting(self) -> list[Any]:
        if self._on_news is None and not self._is_launcher:
            return []
        watch = o.Watch(self._contact.next_id(), self._is_launcher)
        return [watch, *self._ended.values(), *self._seen.values()]

    def _on_message(self, message: o.ToOperator) -> None:
        if isinstance(message, m.Answer):
            return  # to our greeting
        if self._on_news is not None:
            self._on_news(message)
