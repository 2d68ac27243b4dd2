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
from typing import Any, TypeAlias

import msgspec

from paceline import errors
from paceline.control.client.coordinator_connection import Contact, Identity
from paceline.control.client.requests import expect
from paceline.control.member import Membership
from paceline.control.membership.decisions import Place, Remark, Unwanted, Wanted
from paceline.control.membership.policy import Policy
from paceline.control.transport import messages as m
from paceline.control.transport.loop_thread import LoopThread
from paceline.observe.telemetry.events import Event, Happening, ServerLoad
from paceline.observe.telemetry.staleness import TableReport

ROLE = "operator"  # in the handshake


class FromOperator(msgspec.Struct, frozen=True, tag=True):
    """Base of what an operator says."""


class Ask(FromOperator, frozen=True):
    """Base of what is answered."""

    id: int


class Watch(Ask, frozen=True):
    """Tell me from now on what happens; answered with Status."""

    is_launcher: bool = False  # it sees the processes, and its word about them counts


class Reserve(Ask, frozen=True):
    """A process will come: give it a rank and a number. Answered with Placed."""

    role: str
    number: int | None = None


class Scale(Ask, frozen=True):
    workers: int


class AddServers(Ask, frozen=True):
    count: int


class RemoveServers(Ask, frozen=True):
    numbers: tuple[int, ...]


class SetPace(Ask, frozen=True):
    """Change the pace of all workers. Answered with the step behind which they do."""

    pace: str


class AskStatus(Ask, frozen=True):
    pass


class Ended(FromOperator, frozen=True):
    """A process of the launcher has ended."""

    rank: int
    text: str
    kind: m.LossKind | None  # how it is lost; None: it ended in good order


class Seen(FromOperator, frozen=True):
    """The launcher sees a process run, or stopped for so long."""

    rank: int
    stopped_for_s: float | None = None


class Placed(m.Answer, frozen=True):
    place: Place


class Status(m.Answer, frozen=True):
    """The job as the coordinator sees it."""

    policy: Policy
    membership: Membership | None
    missing: tuple[int, ...] = ()  # of the first crowd
    wanted: tuple[Wanted, ...] = ()
    reserved: tuple[Place, ...] = ()
    states: dict[int, str] = {}  # by rank: "silent: ..." and the like, if there is something to say
    not_adopted: tuple[int, ...] = ()  # ranks that do not work in this generation yet
    reports: tuple[TableReport, ...] = ()  # the last word of each server about each table
    loads: tuple[ServerLoad, ...] = ()  # the same about what it has to do
    is_finishing: bool = False
    over: str = ""

    @property
    def generation(self) -> int:
        return 0 if self.membership is None else self.membership.generation

    @property
    def degraded(self) -> tuple[int, ...]:
        """The partitions that have fewer copies than they should."""
        if self.membership is None:
            return ()
        held = self.membership.partitions
        return tuple(p for p, ranks in enumerate(held) if len(ranks) < self.policy.replicas)


class Happened(m.FromCoordinator, frozen=True):
    """Something for people: what a member reported, or what became of one."""

    event: Event | Happening


OperatorMessage: TypeAlias = (
    m.Heartbeat
    | m.Leave
    | Watch
    | Reserve
    | Scale
    | AddServers
    | RemoveServers
    | SetPace
    | AskStatus
    | Ended
    | Seen
)
News: TypeAlias = m.Changed | m.Over | m.Presence | Happened | Wanted | Unwanted | Remark
ToOperator: TypeAlias = News | m.Reply | m.Failure | Placed | Status


ANSWER_S = 10.0
_HEARTBEAT_S = 0.5
_VANISHED_S = 15.0

_decoder: msgspec.msgpack.Decoder[ToOperator] = msgspec.msgpack.Decoder(ToOperator)


class Operator:
    """One operator's connection; made by `Operator.connect`."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        job_id: str,
        on_news: Callable[[News], None] | None,
        is_launcher: bool,
    ) -> None:
        self._thread = LoopThread("paceline-operator")
        self._on_news, self._is_launcher = on_news, is_launcher
        self._ended: dict[int, Ended] = {}  # by rank: told again to a coordinator that is back
        self._seen: dict[int, Seen] = {}
        self._contact: Contact[ToOperator] = Contact(
            address,
            Identity(secret, job_id, ROLE, -1),
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
        on_news: Callable[[News], None] | None = None,
        is_launcher: bool = False,
    ) -> Operator:
        """Connect and authenticate; `on_news` hears everything from now on."""
        operator = cls(address, secret, job_id, on_news, is_launcher)
        try:
            operator._thread.call(operator._contact.open(timeout_s))
            if on_news is not None or is_launcher:
                operator._ask(lambda n: Watch(n, is_launcher), timeout_s)
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
        answer = self._ask(lambda n: Reserve(n, role, number), timeout_s)
        return expect(answer, Placed).place

    def report_end(self, rank: int, text: str, kind: m.LossKind | None) -> None:
        """Report that a process has ended, and how: by its kind, and in words for people.

        `kind` None: it has ended in good order, whether or not it could say so itself.
        """
        self._ended[rank] = Ended(rank, text, kind)
        self._seen.pop(rank, None)
        self._thread.post(self._contact.tell, self._ended[rank])

    def report_running(self, rank: int) -> None:
        """Tell that a process runs: if it is silent, it is starved, not lost."""
        self._report_seen(Seen(rank))

    def report_stopped(self, rank: int, for_s: float) -> None:
        """Tell that a process has been stopped for so long."""
        self._report_seen(Seen(rank, for_s))

    def scale(self, workers: int, timeout_s: float = ANSWER_S) -> None:
        """Have that many workers from now on."""
        self._ask(lambda n: Scale(n, workers), timeout_s)

    def servers_add(self, count: int, timeout_s: float = ANSWER_S) -> None:
        """Have so many more servers."""
        self._ask(lambda n: AddServers(n, count), timeout_s)

    def servers_remove(self, numbers: Iterable[int], timeout_s: float = ANSWER_S) -> None:
        """Empty these servers, and let them go."""
        those = tuple(numbers)
        self._ask(lambda n: RemoveServers(n, those), timeout_s)

    def set_pace(self, pace: str, timeout_s: float = ANSWER_S) -> int:
        """Change the pace of all workers; return the step behind which they do."""
        answer = self._ask(lambda n: SetPace(n, pace), timeout_s)
        return int(expect(answer, m.Reply).value or 0)

    def status(self, timeout_s: float = ANSWER_S) -> Status:
        """Return how the job is."""
        return expect(self._ask(AskStatus, timeout_s), Status)

    def close(self) -> None:
        """End the connection and the thread. May be called twice."""
        if self._thread.is_running and self._contact.gone is None:
            self._thread.call(self._contact.leave(m.Leave()))
        self._thread.stop()

    def _report_seen(self, seen: Seen) -> None:
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
        watch = Watch(self._contact.next_id(), self._is_launcher)
        return [watch, *self._ended.values(), *self._seen.values()]

    def _on_message(self, message: ToOperator) -> None:
        if isinstance(message, m.Answer):
            return  # to our greeting
        if self._on_news is not None:
            self._on_news(message)
