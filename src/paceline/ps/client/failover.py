"""Failover of a link: which server answers for a partition, and which requests are sent again.

The membership names the PRIMARY of every partition and the generation since which it is the
primary. A connection belongs to one such primary. When it breaks, only a later membership can name
the server that answers from then on: a server that answered before the other servers have agreed
would be a second primary.

Requests are numbered in order, and a server handles them in that order, however long each reply
takes. After a failover every request that is still pending is sent again under its old number. A
server answers what it has handled already, and does not apply it again.

    a request with a reply      is pending until its reply has been read
    a request without a reply   is pending until a later request is answered: by then every replica
                                has handled it too

`choose_action` and `PendingRequests` are pure. Threads: none of its own; the link calls under its
lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from paceline import errors
from paceline.control.member import Member, Membership

if TYPE_CHECKING:
    from paceline.comm.fabric import Fabric
    from paceline.ps.connection import ServerConnection

_REPORT_S = 0.5  # how long the coordinator may take to miss a server by itself
_CUT_OFF_S = 20.0  # without the coordinator, no process knows the primary
_SHOWN = 4

# -- which server answers ---------------------------------------------------------------------


@dataclass(frozen=True)
class Primary:
    """One server as the primary of a partition."""

    server: int  # rank
    since: int  # generation


@dataclass(frozen=True)
class Stay:
    """The connection in use is the right one."""


@dataclass(frozen=True)
class Connect:
    """Connect to this primary, and send again what is pending."""

    primary: Primary


@dataclass(frozen=True)
class Wait:
    """Only a later membership can help."""


@dataclass(frozen=True)
class GiveUp:
    """No server has the partition any more."""


Action = Stay | Connect | Wait | GiveUp


def primary_of(membership: Membership, partition: int) -> Primary | None:
    """Return the primary of a partition; None if no server holds it."""
    holders = membership.holders[partition]
    return Primary(holders[0], membership.primary_since(partition)) if holders else None


def choose_action(
    membership: Membership,
    partition: int,
    worker: int,
    used: Primary | None,
    broken: Primary | None,
) -> Action:
    """Return what to do, given the newest membership.

    `used`: the primary that this worker is connected to; `broken`: the last one whose connection
    broke.
    """
    primary = primary_of(membership, partition)
    if primary is None:
        return GiveUp()
    if primary == used:
        return Stay()
    if primary == broken or worker not in membership.ranks:  # this worker is not admitted yet
        return Wait()
    return Connect(primary)


# -- which requests are sent again ------------------------------------------------------------

Content = TypeVar("Content")


@dataclass(eq=False)
class PendingRequest(Generic[Content]):
    """A request under its number, with what is needed to send it again."""

    seq: int
    content: Content


class PendingRequests(Generic[Content]):
    """The requests of one link that may have to be sent again, in order."""

    def __init__(self) -> None:
        self._last = 0
        self._pending: dict[int, PendingRequest[Content]] = {}  # in the order of their numbers
        self._one_way: deque[int] = deque()  # numbers of those without a reply

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingRequest[Content]]:
        """Yield what has to be sent to a server that takes over, in order."""
        return iter(list(self._pending.values()))

    @property
    def read_below(self) -> int:
        """Every request with a lower number has been answered and will not be repeated."""
        return next(iter(self._pending), self._last + 1)

    def add(self, content: Content, *, has_reply: bool = True) -> PendingRequest[Content]:
        """Number a request."""
        self._last += 1
        added = self._pending[self._last] = PendingRequest(self._last, content)
        if not has_reply:
            self._one_way.append(added.seq)
        return added

    def answered(self, seq: int) -> None:
        """Forget a request whose reply has been read, and requests without a reply before it."""
        self._pending.pop(seq, None)
        while self._one_way and self._one_way[0] < seq:
            self._pending.pop(self._one_way.popleft(), None)

    def withdraw(self, seq: int) -> None:
        """Forget a request that was never sent."""
        self._pending.pop(seq, None)


# -- the connection in use --------------------------------------------------------------------


class ControlAgent(Protocol):
    """What a link needs from this process's connection to the coordinator."""

    @property
    def over(self) -> str | None: ...
    @property
    def ending(self) -> errors.PacelineError | None: ...
    @property
    def is_attached(self) -> bool: ...
    def wait_for_generation(self, above: int, timeout_s: float) -> object: ...
    def report_unreachable(self, rank: int, why: str) -> None: ...


class Failover:
    """One worker's connections to the primaries of one partition, at most one at a time.

    A connection is given up when it breaks, or when the newest membership names another primary. A
    server of this host that is no member any more is ended before another one is used: it sees this
    worker's memory, and would write to it when it is continued.
    """

    def __init__(
        self,
        fabric: Fabric,
        partition: int,
        agent: ControlAgent,
        connect: Callable[[Fabric, Membership, int, int], ServerConnection],
    ) -> None:
        """`connect(fabric, membership, partition, rank)` connects to a server."""
        self.connection: ServerConnection | None = None
        self.why: errors.PeerError | None = None  # why the last connection broke; None: it did not
        self._fabric, self._partition = fabric, partition
        self._agent, self._connect = agent, connect
        self._used: Primary | None = None  # that `connection` belongs to
        self._broken: Primary | None = None  # whose connection broke last
        self._broke_s = 0.0
        self._reported_s = 0.0
        self._stayed: Membership | None = None  # in which the connection in use was the right one
        self._linked = 0  # the generation whose servers have been linked

    @property
    def newest(self) -> Membership:
        """The membership that the coordinator has announced last."""
        return self._fabric.newest() or self._fabric.membership

    @property
    def server(self) -> Member | None:
        """The server that answers, or will once it is connected; None: no server can."""
        if self.connection is not None:
            return self.connection.member
        newest = self.newest
        primary = primary_of(newest, self._partition)
        return None if primary is None else newest.member(primary.server)

    def renew(self, holds: Sequence[str]) -> bool:
        """Connect to the primary; true if the connection is new. ServerLost: there is no server."""
        rank, newest = self._fabric.rank, self.newest
        is_known = newest is self._stayed and self.connection is not None
        if is_known and self._agent.over is None and self._agent.ending is None:
            return False  # as the last time; called several times in each request
        if rank not in newest.ranks and rank not in self._fabric.membership.ranks:
            raise errors.UsageError(
                f"rank {rank}: a newcomer cannot ask servers before it has been let in; do so"
                " inside `for step in pl.steps(n)`, or after the first forward pass of the model"
            )
        if isinstance(self._agent.ending, errors.Evicted):
            raise self._agent.ending
        self._link_copies(newest)
        action = choose_action(newest, self._partition, rank, self._used, self._broken)
        if isinstance(action, GiveUp) or self._agent.over is not None:
            raise self.loss(holds)
        if not isinstance(action, Connect):
            self._stayed = newest if isinstance(action, Stay) else None
            return False
        self._end_old(newest)
        try:
            server = action.primary.server
            self.connection = self._connect(self._fabric, newest, self._partition, server)
        except (errors.PeerError, errors.ConnectError, errors.RendezvousError) as error:
            self._note(action.primary, error)
            return False
        self._used, self.why = action.primary, None
        return True

    def _link_copies(self, newest: Membership) -> None:
        """Let every copy of the partition on this host see this worker's memory."""
        if newest.generation == self._linked or self._fabric.rank not in newest.ranks:
            return
        self._linked, index = newest.generation, self._partition
        servers = newest.holders[index] + (newest.filling[index] if newest.filling else ())
        for server in map(newest.member, servers):
            is_here = server.host_id == self._fabric.me.host_id
            if is_here and not self._fabric.is_linked(server.rank):
                threading.Thread(target=self._link, args=(server,), daemon=True).start()

    def _link(self, server: Member) -> None:
        with contextlib.suppress(errors.PacelineError):  # lost, as the next membership will say
            self._fabric.link(server)

    def on_broken(self, connection: ServerConnection, error: errors.PeerError) -> None:
        """Note that a connection is broken."""
        if connection is self.connection and self._used is not None:  # else it was replaced already
            self._note(self._used, error)
            self.drop()

    def drop(self) -> None:
        """Close the connection; what waits for something on it gets GenerationChanged."""
        if self.connection is not None:
            self.connection.close()
        self.connection = self._used = None

    def wait_for_change(self, timeout_s: float, *, has_left: bool) -> None:
        """Wait for a newer membership; PeerLost: this worker has left, and connects to no other
        server."""
        if has_left:
            raise errors.PeerLost(f"partition {self._partition}: its server has hung up")
        self._agent.wait_for_generation(self.newest.generation, timeout_s)

    def look_for_help(self) -> None:
        """Report an unreachable server to the coordinator; PeerTimeout: that is gone as well."""
        now_s = time.monotonic()
        waited_s = now_s - self._broke_s
        if self._broken is None or self.why is None or waited_s < _REPORT_S:
            return
        if now_s - self._reported_s >= _REPORT_S:
            # Repeatedly: the coordinator forgets it with every generation that this worker enters,
            # and when it is restarted.
            self._reported_s = now_s
            self._agent.report_unreachable(self._broken.server, str(self.why)[:300])
        if waited_s > _CUT_OFF_S and not self._agent.is_attached:
            raise errors.PeerTimeout(
                f"rank {self._fabric.rank}: neither the server of partition {self._partition} nor"
                f" the coordinator can be reached for {waited_s:.0f} s. Stopping this process to"
                " avoid split-brain; check this host's network"
            ) from self.why

    def loss(self, holds: Sequence[str]) -> errors.ServerLost:
        """Return the error that no server answers any more; `holds`: labels of lost shards."""
        over = self._agent.over
        what = f"the job is over: {over}" if over else "no server holds it any more"
        last = f" (the last one: {self.why})" if self.why is not None else ""
        return errors.ServerLost(
            f"rank {self._fabric.rank}: partition {self._partition} of the servers' tables is lost:"
            f" {what}{last}. It had {_shown(holds)}: start again from a checkpoint",
            rank=self._broken.server if self._broken is not None else None,
        )

    def _note(self, primary: Primary, error: errors.PacelineError) -> None:
        self._broken, self._broke_s = primary, time.monotonic()
        if not isinstance(error, errors.PeerError):
            error = errors.PeerLost(str(error), rank=primary.server)
        self.why = error

    def _end_old(self, newest: Membership) -> None:
        old = self._broken.server if self._broken is not None else None
        if self.connection is not None:
            old = self.connection.member.rank
        self.drop()
        # A server that left cleanly may still be about to exit.
        presence = self._fabric.presence.get(-1 if old is None else old)
        is_lost = presence is not None and presence.state == "lost"
        if old is not None and old not in newest.ranks and is_lost:
            self._fabric.engine.end_peer(old)


def server_lost(
    rank: int, server: Member, error: errors.PacelineError, holds: Sequence[str]
) -> errors.PacelineError:
    """Return an error of the engine as one about a server that has no backup, and its shards.

    A server that is stopped, or whose machine is, ends a wait with PeerTimeout. Errors other than
    the loss of the server stay as they are.
    """
    if not isinstance(error, errors.PeerLost | errors.PeerTimeout):
        return error
    what, advice = "ended or lost its connection", "its own output says why"
    if isinstance(error, errors.PeerTimeout):
        what = "has not run for longer than it may"
        advice = "it is stopped, or its machine is (PACELINE_LIVENESS_S is the limit)"
    return errors.ServerLost(
        f"rank {rank}: server {server.number} (rank {server.rank}, {server.where}) {what};"
        f" {advice}. It held {_shown(holds)}, and no other server has those values: start again"
        " from a checkpoint",
        rank=server.rank,
    )


def _shown(holds: Sequence[str]) -> str:
    """Return the labels of shards as a text, not too many."""
    text = ", ".join(holds[:_SHOWN]) or "no shard"
    return text if len(holds) <= _SHOWN else f"{text} and {len(holds) - _SHOWN} more"
