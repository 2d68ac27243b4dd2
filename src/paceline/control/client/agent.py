"""The member's side of the control plane.

An agent holds one authenticated connection to the coordinator (coordinator_connection.py). It sends
heartbeats by itself, joins the job, follows its memberships, reports events and uses the store.
While the coordinator is away, membership and links stay usable: training does not depend on it. In
a job that is not elastic the coordinator is not restarted, and calls that need it raise PeerLost;
in an elastic job they wait for it, up to their own deadline.

If the job continues without this process because it was taken for lost, the process is notified
once it can be reached again: from then on `ending` is an `Evicted` error, and every call raises it.
`over` is also set when the job as a whole is over.

Threads: one background thread ("paceline-control") with an asyncio loop owns the connection and
runs the callbacks. All public methods may be called from any other thread; those that block have
their own deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import msgspec

from paceline.control import messages as m
from paceline.control.client.coordinator_connection import (
    ControlClient,
    CoordinatorConnection,
    Identity,
)
from paceline.control.client.requests import ANSWER_S, PoolCalls, StoreCalls, expect, follow_clock
from paceline.control.member import Member, Membership
from paceline.control.transport.loop_thread import LoopThread
from paceline.errors import Evicted, JobOver, PacelineError
from paceline.observe.telemetry.events import Event
from paceline.runtime.console import warn
from paceline.runtime.process_names import span

HEARTBEAT_S = 1.0
LASTING_HEARTBEAT_S = 0.5  # leases are short in an elastic job
_VANISHED_S, _LASTING_VANISHED_S = 15.0, 4.0

PaceMessage: TypeAlias = m.PaceWanted | m.PaceSettled

_decoder: msgspec.msgpack.Decoder[m.CoordinatorMessage] = msgspec.msgpack.Decoder(
    m.CoordinatorMessage
)


class Agent(ControlClient[m.CoordinatorMessage], StoreCalls, PoolCalls):
    """One member's connection to the coordinator; made by `Agent.connect`."""

    def __init__(
        self, address: str, identity: Identity, heartbeat_s: float | None, is_lasting: bool
    ) -> None:
        connection = CoordinatorConnection(
            address,
            identity,
            _decoder,
            heartbeat_s=heartbeat_s or (LASTING_HEARTBEAT_S if is_lasting else HEARTBEAT_S),
            vanished_s=_LASTING_VANISHED_S if is_lasting else _VANISHED_S,
            is_lasting=is_lasting,
            name=f"rank {identity.rank}",
        )
        super().__init__(LoopThread("paceline-control"), connection)
        self.membership: Membership | None = None  # the newest one that is known
        self.presence: dict[int, m.Presence] = {}  # last known change of each other rank
        self.over: str | None = None  # why the job is over, or over for this member
        self.ending: PacelineError | None = None  # the same as an error, to be raised
        # Callbacks, called in the control thread.
        self.on_presence: Callable[[m.Presence], None] | None = None
        self.on_changed: Callable[[m.Changed], None] | None = None
        self.on_over: Callable[[str], None] | None = None
        self.on_pace: Callable[[PaceMessage], None] | None = None
        self.pace_message: PaceMessage | None = None  # the last one before `on_pace` was set
        self.num_workers: int | None = None  # ranks after them are servers; None: not known
        self.num_servers: int | None = None  # ranks after those are data workers
        self._missing: m.Missing | None = None  # the last message about ranks that have not joined
        self._rank = identity.rank
        self._member: Member | None = None  # once it has joined
        self._entered = 0  # the generation in which this member works
        self._follows_clock = False
        self._in_sync: set[tuple[int, int]] = set()  # (partition, generation) sent, not yet listed
        self._news = threading.Condition()  # notified at every membership, and at the end
        connection.on_message = self._on_message
        connection.greet = self._greeting

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

        `is_lasting`: in an elastic job, whose coordinator is restarted if it is killed.
        """
        agent = cls(address, Identity(secret, job_id, role, rank), heartbeat_s, is_lasting)
        agent._open(timeout_s)
        return agent

    @property
    def local_address(self) -> str:
        """This host's address in the network through which the coordinator is reached."""
        return self._connection.local_address

    # -- joining -----------------------------------------------------------------------------

    def join(self, member: Member, timeout_s: float = 60.0) -> Membership:
        """Wait until every rank of the job has joined; RendezvousError names what is wrong."""
        return self._enter(member, lambda n: m.Join(n, member, timeout_s), timeout_s + ANSWER_S)

    def look(self, timeout_s: float = ANSWER_S) -> Membership:
        """Return the membership, for a newcomer that has not joined yet."""
        self._learn(expect(self._ask(m.Look, timeout_s), m.Joined).membership)
        self._start_clock()
        assert self.membership is not None
        return self.membership

    def ready(self, member: Member, timeout_s: float = 600.0) -> Membership:
        """Wait, as a newcomer, until a membership with this member in it is published."""
        return self._enter(member, lambda n: m.Ready(n, member), timeout_s)

    def _enter(self, member: Member, make: Callable[[int], Any], timeout_s: float) -> Membership:
        self._member = member
        found = expect(self._ask(make, timeout_s), m.Joined).membership
        if found.generation == 1:
            self._entered = 1  # there is no older generation to leave
        self._learn(found)
        self._start_clock()
        return found

    def _start_clock(self) -> None:
        """Follow the job's clock from now on, in the background."""
        if not self._follows_clock:
            self._follows_clock = True
            ask = self._connection.ask
            self.thread.start(follow_clock(lambda make: ask(make, ANSWER_S)))

    def waits_to_join(self) -> list[tuple[str, float, Sequence[int]]]:
        """Return the wait for ranks that have not joined, as a source of `WaitWatch`
        (control/wait_notice.py)."""
        missing = self._missing
        if missing is None or self.membership is not None:
            return []
        return [("the start of the job", missing.waited_s, missing.ranks)]

    # -- as a member -------------------------------------------------------------------------

    def entered(self, generation: int) -> None:
        """Report that this member works in that generation and has left all older ones."""
        self._entered = max(self._entered, generation)
        self._send(m.Adopted(generation))

    def report_unreachable(self, rank: int, why: str) -> None:
        """Report that this member cannot reach another; an empty `why` takes it back."""
        self._send(m.Accuse(rank, why))

    def in_sync(self, partition: int, generation: int) -> None:
        """Report that this server has caught up with a partition.

        Only once the primary waits for this server's acknowledgement before every reply: this
        server may be the only holder in the next moment. `generation`: in which that was agreed
        with the primary; an agreement with an earlier primary does not count.
        """
        self._in_sync.add((partition, generation))
        self._send(m.InSync(partition, generation))

    def wait_for_generation(self, above: int, timeout_s: float) -> Membership | None:
        """Wait for a membership newer than `above`; None if there is none in that time.

        Returns early, with None, if `over` is set.
        """

        def newest() -> Membership | None:
            found = self.membership
            return found if found is not None and found.generation > above else None

        with self._news:
            self._news.wait_for(lambda: newest() is not None or self.over is not None, timeout_s)
            return newest()

    def answer_pace(self, answer: m.PaceAnswer) -> None:
        """Answer a request for another pace. From any thread, the control thread included."""
        self._send(answer)

    def report(self, event: Event) -> None:
        """Send an event to the operators. Returns at once; dropped if the coordinator is away."""
        self._send(m.Report(event))

    # -- leaving -----------------------------------------------------------------------------

    def leave(self, *, is_finished: bool = True, has_lost_peer: bool = False) -> None:
        """Notify the coordinator that this member exits cleanly; no effect if it is gone.

        `is_finished`: its work is done; otherwise the job continues, and may replace it.
        `has_lost_peer`: it fails, but only because it lost a peer.
        """
        self._leave(m.Leave(is_finished, has_lost_peer))

    def close(self) -> None:
        """Leave, close the connection and end the thread. May be called twice."""
        self.leave()
        self.thread.stop()

    def _ask_soon(self, make: Callable[[int], Any], timeout_s: float) -> Future[m.Answer]:
        return self.thread.start(self._connection.ask(make, timeout_s))

    # -- in the control thread ---------------------------------------------------------------

    def _greeting(self) -> list[Any]:
        """Return the first messages to a coordinator that was restarted or lost our connection."""
        known = self.membership
        if self._member is None or known is None or self._rank not in known.ranks:
            return []  # the pending request is repeated
        request_id = self._connection.next_id()
        attach = m.Attach(request_id, self._member, self._entered, known.generation)
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
            self._on_pace_message(message)
        elif isinstance(message, m.Missing):
            missing = _names(message.ranks, self.num_workers, self.num_servers)
            so_far = f"({message.waited_s:.0f} s so far)"
            warn(f"rank {self._rank} waits for {missing} to join {so_far}")
            self._missing = message

    def _on_pace_message(self, message: PaceMessage) -> None:
        if self.on_pace is None:
            self.pace_message = message  # the job is still setting up its model
        else:
            self.on_pace(message)

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
        elif self._is_newer(message.membership):
            if self.on_changed is not None:  # first: a reader of the membership knows the losses
                self.on_changed(message)
            self._learn(message.membership)

    def _is_newer(self, membership: Membership) -> bool:
        return self.membership is None or self.membership.generation < membership.generation

    def _learn(self, membership: Membership) -> None:
        """Take a membership, unless a newer one is known."""
        with self._news:
            if not self._is_newer(membership):
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
                f"rank {self._rank} was taken for lost, and the job continues without it: {why};"
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
            self._connection.give_up(error)
        if self.on_over is not None:
            self.on_over(why)


def _names(ranks: Sequence[int], num_workers: int | None, num_servers: int | None) -> str:
    """Return 'rank 1 and servers 0-1'."""
    end = max(ranks) + 1
    first = end if num_workers is None else num_workers
    second = end if num_servers is None else first + num_servers
    nouns = {"rank": (0, first), "server": (first, second), "data worker": (second, end)}
    numbers = {
        noun: [rank - start for rank in ranks if start <= rank < stop]
        for noun, (start, stop) in nouns.items()
    }
    return " and ".join(
        f"{noun}{'s' if len(found) > 1 else ''} {span(found)}"
        for noun, found in numbers.items()
        if found
    )
