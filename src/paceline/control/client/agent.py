"""The member's side of the control plane.

An agent holds one authenticated connection to the coordinator (coordinator_connection.py). It sends
heartbeats by itself, joins the job, follows its memberships, reports events and asks the store.
While the coordinator is away, membership and links stay usable: training does not depend on it. In
a job that is not elastic it never comes back, and calls that need it raise PeerLost; in an elastic
one they wait for it, up to their own deadline.

A process that the others took for lost is told so when it can be reached again: from then on
`ending` is an `Evicted` error, and every call raises it. `over` also says when the job as a whole
cannot go on.

Threads: one background thread ("paceline-control") with an asyncio loop owns the connection and
runs the callbacks. All public methods may be called from any thread but that one; those that
block carry their own deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import msgspec

from paceline import errors
from paceline.control.client import clock_sync as timekeeping
from paceline.control.client.coordinator_connection import Contact, Identity
from paceline.control.client.requests import ANSWER_S, PoolCalls, StoreCalls, expect
from paceline.control.member import Member, Membership
from paceline.control.transport import messages as m
from paceline.control.transport.loop_thread import LoopThread
from paceline.errors import Evicted, JobOver, PacelineError
from paceline.observe.telemetry.events import Event
from paceline.runtime.console import warn

HEARTBEAT_S = 1.0
LASTING_HEARTBEAT_S = 0.5  # leases are short in an elastic job
_VANISHED_S, _LASTING_VANISHED_S = 15.0, 4.0

PaceNews: TypeAlias = m.PaceWanted | m.PaceSettled

_decoder = msgspec.msgpack.Decoder(m.CoordinatorMessage)


class Agent(StoreCalls, PoolCalls):
    """Speaks with the coordinator for one member; made by `Agent.connect`."""

    def __init__(
        self, address: str, identity: Identity, heartbeat_s: float | None, is_lasting: bool
    ) -> None:
        self.thread = LoopThread("paceline-control")
        self.membership: Membership | None = None  # the newest one that is known
        self.presence: dict[int, m.Presence] = {}  # last known change of each other rank
        self.over: str | None = None  # why the job, or this member's part in it, is over
        self.ending: PacelineError | None = None  # the same as an error, to be raised
        # Callbacks, called in the control thread.
        self.on_presence: Callable[[m.Presence], None] | None = None
        self.on_changed: Callable[[m.Changed], None] | None = None
        self.on_over: Callable[[str], None] | None = None
        self.on_pace: Callable[[PaceNews], None] | None = None
        self.pace_news: PaceNews | None = None  # the last, while nobody takes it
        self.num_workers: int | None = None  # ranks behind them are servers; None: not known
        self.num_servers: int | None = None  # ranks behind those are data workers
        self._missing: m.Missing | None = None  # the last word on who has not joined
        self._rank = identity.rank
        self._contact = Contact(
            address,
            identity,
            _decoder,
            heartbeat_s=heartbeat_s or (LASTING_HEARTBEAT_S if is_lasting else HEARTBEAT_S),
            vanished_s=_LASTING_VANISHED_S if is_lasting else _VANISHED_S,
            is_lasting=is_lasting,
            name=f"rank {identity.rank}",
        )
        self._contact.on_message = self._on_message
        self._contact.greet = self._greeting
        self._member: Member | None = None  # once it has joined
        self._adopted = 0
        self._is_timed = False  # it follows the coordinator's clock
        self._in_sync: set[tuple[int, int]] = set()  # (partition, generation) said, not yet listed
        self._news = threading.Condition()  # notified at every membership, and at the end

    @classmethod
    def connect(
        cls,
        address: str,
        secret: bytes,
        job_id: str,
        rank: int,
        role: str = "worker",
        *,
        timeout_s: float = 10.0,
        heartbeat_s: float | None = None,
        is_lasting: bool = False,
    ) -> Agent:
        """Connect and authenticate; raises ConnectError, AuthError or VersionMismatch.

        `is_lasting`: in an elastic job, whose coordinator comes back when it was killed.
        """
        agent = cls(address, Identity(secret, job_id, role, rank), heartbeat_s, is_lasting)
        try:
            agent.thread.call(agent._contact.open(timeout_s))
        except BaseException:
            agent.thread.stop()
            raise
        return agent

    @property
    def local_address(self) -> str:
        """Ours in the network through which the coordinator is reached."""
        return self._contact.local_address

    @property
    def is_attached(self) -> bool:
        """Say whether the coordinator can be spoken with right now."""
        return self._contact.is_attached

    @property
    def unreachable_s(self) -> float:
        """For how long it could not; 0 when it can."""
        return self._contact.unreachable_s

    # -- coming in ---------------------------------------------------------------------------

    def join(self, member: Member, timeout_s: float = 60.0) -> Membership:
        """Wait until every rank of the job has joined; RendezvousError names what is wrong."""
        return self._enter(member, lambda n: m.Join(n, member, timeout_s), timeout_s + ANSWER_S)

    def look(self, timeout_s: float = ANSWER_S) -> Membership:
        """Return who is there, for a newcomer that is not in yet."""
        self._learn(expect(self._ask(m.Look, timeout_s), m.Joined).membership)
        self._keep_time()
        assert self.membership is not None
        return self.membership

    def ready(self, member: Member, timeout_s: float = 600.0) -> Membership:
        """Wait, as a newcomer, until a membership with this member in it is published."""
        return self._enter(member, lambda n: m.Ready(n, member), timeout_s)

    def _enter(self, member: Member, make: Callable[[int], Any], timeout_s: float) -> Membership:
        self._member = member
        found = expect(self._ask(make, timeout_s), m.Joined).membership
        if found.generation == 1:
            self._adopted = 1  # there is nothing older to be done with
        self._learn(found)
        self._keep_time()
        return found

    def _keep_time(self) -> None:
        """Follow the job's clock from now on, in the background."""
        if not self._is_timed:
            self._is_timed = True
            self.thread.start(timekeeping.follow(lambda make: self._answer(make, ANSWER_S)))

    def waits_to_join(self) -> list[tuple[str, float, Sequence[int]]]:
        """Return whom this member waits for to join, as `WaitWatch` (control/wait_notice.py) takes
        it."""
        missing = self._missing
        if missing is None or self.membership is not None:
            return []
        return [("the start of the job", missing.waited_s, missing.ranks)]

    # -- being in ----------------------------------------------------------------------------

    def adopted(self, generation: int) -> None:
        """Say that this member works in that generation; everything older is behind it."""
        self._adopted = max(self._adopted, generation)
        self.thread.post(self._contact.tell, m.Adopted(generation))

    def accuse(self, rank: int, why: str) -> None:
        """Say that another member cannot be reached; an empty `why` takes it back."""
        self.thread.post(self._contact.tell, m.Accuse(rank, why))

    def in_sync(self, partition: int, generation: int) -> None:
        """Say that this server, which was being filled, has everything of a partition.

        Only when the primary sends no reply any more before this server has acknowledged it: the
        next moment it may be the only one left. `generation`: in which that was agreed with the
        primary; what was agreed with an earlier primary does not count.
        """
        self._in_sync.add((partition, generation))
        self.thread.post(self._contact.tell, m.InSync(partition, generation))

    def wait_for_generation(self, above: int, timeout_s: float) -> Membership | None:
        """Wait for a membership newer than `above`; None when there is none in that time.

        Returns early, with None, when `over` is set.
        """

        def newest() -> Membership | None:
            found = self.membership
            return found if found is not None and found.generation > above else None

        with self._news:
            self._news.wait_for(lambda: newest() is not None or self.over is not None, timeout_s)
            return newest()

    def answer_pace(self, answer: m.PaceAnswer) -> None:
        """Answer a wish for another pace. From any thread, the control thread included."""
        self.thread.post(self._contact.tell, answer)

    def report(self, event: Event) -> None:
        """Pass an event to whoever watches the job. Returns at once; dropped when nobody can."""
        self.thread.post(self._contact.tell, m.Report(event))

    # -- going out ---------------------------------------------------------------------------

    def leave(self, *, is_finished: bool = True, is_bereft: bool = False) -> None:
        """Tell the coordinator that this member ends in good order; no effect if it is gone.

        `is_finished`: its work is done; otherwise the job goes on, and somebody may replace it.
        `is_bereft`: it fails, but only because it has lost a peer.
        """
        if self._contact.gone is None and self.thread.is_running:
            self.thread.call(self._contact.leave(m.Leave(is_finished, is_bereft)))

    def close(self) -> None:
        """Leave, close the connection and end the thread. May be called twice."""
        self.leave()
        self.thread.stop()

    def _ask(self, make: Callable[[int], Any], timeout_s: float = ANSWER_S) -> m.Answer:
        if self._contact.gone is not None:
            raise self._contact.gone
        return self.thread.call(self._answer(make, timeout_s))

    def _ask_soon(self, make: Callable[[int], Any], timeout_s: float) -> Future[m.Answer]:
        return self.thread.start(self._answer(make, timeout_s))

    def _tell(self, message: Any) -> None:
        self.thread.post(self._contact.tell, message)

    async def _answer(self, make: Callable[[int], Any], timeout_s: float) -> m.Answer:
        reply = await self._contact.ask(make, timeout_s)
        if isinstance(reply, m.Failure):
            raise errors.named(reply.error, reply.text)
        return reply

    # -- in the control thread ---------------------------------------------------------------

    def _greeting(self) -> list[Any]:
        """What a coordinator must hear first that was restarted, or lost our connection."""
        known = self.membership
        if self._member is None or known is None or self._rank not in known.ranks:
            return []  # what was asked is asked again
        request_id = self._contact.next_id()
        attach = m.Attach(request_id, self._member, self._adopted, known.generation)
        return [attach, *(m.InSync(*claim) for claim in sorted(self._in_sync))]

    def _on_message(self, message: m.CoordinatorMessage) -> None:
        if isinstance(message, m.Presence):
            self._on_presence(message)
        elif isinstance(message, m.Changed):
            self._on_changed(message)
        elif isinstance(message, m.Joined):  # the answer to our greeting
            self._learn(message.membership)
        elif isinstance(message, m.Failure):
            if message.error == "Evicted":
                self._end(message.text, Evicted(message.text, rank=self._rank))
        elif isinstance(message, m.Over):
            self._end(message.why, JobOver(f"the job is over: {message.why}"))
        elif isinstance(message, m.PaceWanted | m.PaceSettled):
            self._on_pace_news(message)
        elif isinstance(message, m.Missing):
            whom = _names(message.ranks, self.num_workers, self.num_servers)
            so_far = f"({message.waited_s:.0f} s so far)"
            warn(f"rank {self._rank} waits for {whom} to join {so_far}")
            self._missing = message

    def _on_pace_news(self, news: PaceNews) -> None:
        if self.on_pace is None:
            self.pace_news = news  # of a job that sets up its model still
        else:
            self.on_pace(news)

    def _on_presence(self, message: m.Presence) -> None:
        if message.rank == self._rank:
            self._evict(message.detail, message.kind)
            return
        self.presence[message.rank] = message
        if self.on_presence is not None:
            self.on_presence(message)

    def _on_changed(self, message: m.Changed) -> None:
        mine = [loss for loss in message.lost if loss.rank == self._rank]
        if mine:
            self._evict(mine[0].why, mine[0].kind)
        elif self._is_news(message.membership):
            if self.on_changed is not None:  # first: whoever sees the membership knows who is lost
                self.on_changed(message)
            self._learn(message.membership)

    def _is_news(self, membership: Membership) -> bool:
        return self.membership is None or self.membership.generation < membership.generation

    def _learn(self, membership: Membership) -> None:
        """Take in a membership, unless a newer one is known."""
        with self._news:
            if not self._is_news(membership):
                return
            self.membership = membership
            listed = [p for p, ranks in enumerate(membership.partitions) if self._rank in ranks]
            self._in_sync = {claim for claim in self._in_sync if claim[0] not in listed}
            self._news.notify_all()

    def _evict(self, why: str, kind: m.LossKind | None) -> None:
        if kind is not None and not kind.is_own:
            text = f"rank {self._rank} is {why}"
        else:
            text = (
                f"rank {self._rank} was taken for lost, and the others go on without it: {why};"
                " start it again, as a newcomer"
            )
        self._end(text, Evicted(text, rank=self._rank))

    def _end(self, why: str, error: PacelineError) -> None:
        if self.over is not None:
            return
        with self._news:
            self.ending, self.over = error, why
            self._news.notify_all()
        if isinstance(error, Evicted):
            self._contact.give_up(error)
        if self.on_over is not None:
            self.on_over(why)


def _names(ranks: Sequence[int], num_workers: int | None, num_servers: int | None) -> str:
    """Write 'rank 1 and servers 0, 1'."""
    end = max(ranks) + 1
    first = end if num_workers is None else num_workers
    second = end if num_servers is None else first + num_servers
    nouns = {"rank": (0, first), "server": (first, second), "data worker": (second, end)}
    numbers = {
        noun: [rank - start for rank in ranks if start <= rank < stop]
        for noun, (start, stop) in nouns.items()
    }
    return " and ".join(
        f"{noun}{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
        for noun, found in numbers.items()
        if found
    )
