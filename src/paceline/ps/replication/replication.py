"""Chain replication: how the copies of a partition stay equal when servers are lost. Pure: no
sockets, no torch, no time.

The holders of a partition form a CHAIN, in the order in which the membership lists them; a copy
that is CATCHING UP is the last one. The first is the PRIMARY: it numbers requests (the INDEX of an
entry), applies them and forwards them. Every other copy applies and forwards what arrives from its
UPSTREAM. So each copy has applied a prefix of what its upstream has, in the same order.
Acknowledgements travel the other way: a copy acknowledges what its whole DOWNSTREAM has. An answer
leaves the primary when all entries before it are acknowledged, also the answer to a read: what a
client has seen, every holder has. A copy keeps entries that are not acknowledged, to forward them
again.

    client --> primary --> backup --> catching up     entries
           <--         <--        <--                 answers, acknowledgements

What happens when
    the primary is lost     the next holder becomes the primary; its downstream does not notice
    another copy is lost    its upstream sends Begin to the next one, which replies how far it is
                            (Standing), and forwards the kept entries that this one lacks
    a copy is new           it has nothing (EMPTY): its upstream sends a snapshot of its state at
                            one index (FillStart, then FillParts, which the owner defines, in order
                            between entries, then FillEnd). Answers wait for it from FillStart on,
                            so it has everything when it reports that it is in sync
    the order changes       the old primary's last entry is HANDOVER. A copy that has applied it,
    while all are alive     and whose whole downstream has, takes its place in the new order. From
                            then on the new primary takes requests. If the old primary is lost
                            before, the next copy in the old order hands over instead

FENCING. A copy ignores servers that are not its upstream, and messages of a newer generation wait
until that generation is entered here. A deposed primary therefore gets no acknowledgement and can
answer nothing: its successor was downstream of it, and has another upstream or none.

applied.py records what was applied and answered, equally on all copies.

ALONE. A primary without a downstream waits for no acknowledgement: its owner applies new requests
itself, updates `applied` (index, last, answers) and calls neither `submit` nor `answer`. Repeated
requests, a client's first one, and events are submitted as always. `is_alone` can only change in
`adopt`, `receive` and `disconnected`, never while an entry is applied.

Interface: `adopt` every membership in turn; `connected` and `disconnected` when a connection to
another copy is formed or breaks (between the two, messages arrive in order and none is left out);
`receive` its messages; `submit` requests while `is_open`; `answer` while an entry is applied;
`flush` when all that has arrived is handled. The owner does the rest. A server reports to the
coordinator that it has entered a generation when all of its copies are `is_settled`. The roster
must list a copy as holder only for an InSync whose generation is not older than the last change of
that partition's holders.

Threads: none; the loop of the server calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any

from paceline.ps.replication.applied import EMPTY, Applied
from paceline.ps.replication.chain import (
    HANDOVER,
    Ack,
    Begin,
    FillEnd,
    FillPart,
    FillStart,
    Forward,
    LogEntry,
    Message,
    ReplicaOwner,
    Role,
    Standing,
)


class _Down(Enum):
    """What is known of the downstream copy."""

    NONE = 0  # there is none
    GREETED = 1  # not connected, or it has not replied to Begin yet
    FILLING = 2
    FOLLOWS = 3


class Replica:
    """One server's copy of a partition."""

    def __init__(self, me: int, owner: ReplicaOwner) -> None:
        self.me = me
        self.role = Role.NONE
        self.generation = 0
        self.applied = Applied()
        self.is_alone = False  # see ALONE above
        self.refused = 0  # messages of servers that are neither upstream nor downstream
        self.upstream: int | None = None
        self.downstream: int | None = None
        self._owner = owner
        self._holders: tuple[int, ...] = ()
        self._target: tuple[int, ...] = ()  # the chain as the membership has it
        self._order: tuple[int, ...] = ()  # that is in effect
        self._switch_at: int | None = None  # index of the handover that is under way
        self._early: list[tuple[int, Message]] = []  # of generations that are not entered yet
        self._connected: set[int] = set()
        self._is_partial = False
        self._reported = EMPTY  # acknowledged to the upstream
        self._down = _Down.NONE
        self._counts = False  # answers wait for the downstream
        self._may_be_in_sync = False  # the downstream may have reported that it has everything
        self._acked = EMPTY  # by the downstream
        self._kept: deque[LogEntry] = deque()  # applied, not acknowledged
        self._deferred: deque[tuple[int, int, int, Any, Any]] = deque()  # index, rank, seq, ...

    # -- membership ---------------------------------------------------------------------------

    def adopt(self, generation: int, holders: Sequence[int], filling: Sequence[int] = ()) -> None:
        """Take the role that a newer membership gives; older memberships are ignored."""
        if generation <= self.generation:
            return
        is_fresh = self.generation == 0
        self.generation, self._holders = generation, tuple(holders)
        self._target = (*holders, *filling[:1])
        before = self._order
        self._order = self._order_after(before)
        self._take_role(filling, is_fresh)
        self._link(before)
        self.is_alone = self.is_open and self.downstream is None
        if self._down is _Down.FOLLOWS and self.downstream not in self._holders:
            self._send_down(FillEnd(generation))
        self._settle()
        is_first = self._order[:1] == (self.me,)
        if is_first and self._order != self._target and self._switch_at is None:
            self._append(LogEntry(self.index + 1, self.me, 0, HANDOVER))
        early, self._early = self._early, []
        for sender, message in early:
            self.receive(sender, message)

    @property
    def index(self) -> int:
        """The newest entry that this copy has applied."""
        return self.applied.index

    @property
    def is_open(self) -> bool:
        """Whether requests may be submitted: the primary is first in the order in effect."""
        return self.role is Role.PRIMARY and self._order[:1] == (self.me,)

    @property
    def is_settled(self) -> bool:
        """Whether the order of the newest membership is in effect here."""
        return self._order == self._target

    def connected(self, peer: int) -> None:
        """Note that messages can be sent to another server."""
        self._connected.add(peer)
        if peer == self.downstream:
            self._greet()

    def disconnected(self, peer: int) -> None:
        """Note that the connection to another server is broken."""
        self._connected.discard(peer)
        if peer == self.downstream:
            self._down, self._counts = _Down.GREETED, self._counts and self._may_be_in_sync
            self._settle()

    def _order_after(self, before: tuple[int, ...]) -> tuple[int, ...]:
        """Return the order that is in effect until a handover, if there has to be one.

        Only copies that were in the chain take part in it: new copies have nothing to hand over,
        and join with the new order.
        """
        staying = tuple(rank for rank in before if rank in self._target)
        is_same = staying == tuple(rank for rank in self._target if rank in staying)
        return self._target if is_same or self.me not in before else staying

    def _take_role(self, filling: Sequence[int], is_fresh: bool) -> None:
        self.role = Role.NONE
        if self.me in filling:
            self.role = Role.FILLING
        elif self.me in self._holders:
            self.role = Role.PRIMARY if self.me == self._holders[0] else Role.BACKUP
            if is_fresh:
                self.applied.index = 0  # nothing has happened yet
        if self._is_partial and self._order[:1] == (self.me,):
            self.role = Role.LOST
        if self.role is not Role.PRIMARY:
            self._deferred.clear()
        if self.role is Role.NONE:
            self._forget_all()
            self._order = self._target = ()

    def _forget_all(self) -> None:
        self.applied.clear()
        self._is_partial = False
        self._switch_at = None
        self._kept.clear()

    def _link(self, before: tuple[int, ...]) -> None:
        """Find the neighbours in the order that is in effect; `before`: the order until now."""
        upstream, downstream = self._neighbours(self._order)
        if upstream != self.upstream:
            self.upstream, self._reported = upstream, EMPTY
        if downstream == self.downstream:
            if downstream in self._holders:
                self._counts = self._may_be_in_sync = True
            return
        self.downstream = downstream
        self._down = _Down.NONE if downstream is None else _Down.GREETED
        # A copy that was in the chain may have got everything from another upstream.
        self._counts = self._may_be_in_sync = downstream in (*self._holders, *before)
        if not self._counts:
            self._kept.clear()
        if downstream in self._connected:
            self._greet()

    def _neighbours(self, order: tuple[int, ...]) -> tuple[int | None, int | None]:
        if self.me not in order:
            return None, None
        index = order.index(self.me)
        after = order[index + 1 :]
        return (order[index - 1] if index else None), (after[0] if after else None)

    def _greet(self) -> None:
        self._down = _Down.GREETED
        self._send_down(Begin(self.generation, self.index))

    def _switch(self) -> None:
        """Enter the new order."""
        self.flush()  # the old upstream waits for this as well
        before, self._switch_at, self._order = self._order, None, self._target
        self._link(before)
        self.is_alone = self.is_open and self.downstream is None
        self._settle()

    # -- requests, on the primary -------------------------------------------------------------

    def submit(self, rank: int, seq: int, op: Any) -> bool:
        """Add a request or an event (seq 0) to the log; false: its answer is on its way."""
        assert self.is_open, (self.role, self._order)
        again = False
        if seq:
            again = self.applied.has(rank, seq)
            is_answered = self.applied.is_answered(rank, seq)
            if again and (not is_answered or self._is_deferred(rank, seq)):
                return False
        self._append(LogEntry(self.index + 1, rank, seq, op, again))
        return True

    def answer(self, rank: int, seq: int, answer: Any, extra: Any = None) -> None:
        """Give the answer to a request; it leaves when every copy has what led to it."""
        self.applied.keep(rank, seq, answer)
        if not self.is_open:
            return
        if self._settled >= self.index and not self._deferred:
            self._owner.deliver(rank, seq, answer, extra)
        else:
            self._deferred.append((self.index, rank, seq, answer, extra))

    def _is_deferred(self, rank: int, seq: int) -> bool:
        return any(one[1:3] == (rank, seq) for one in self._deferred)

    # -- messages -----------------------------------------------------------------------------

    def receive(self, sender: int, message: Message) -> None:
        """Handle a message of another copy."""
        if message.generation > self.generation:
            self._early.append((sender, message))
        elif isinstance(message, Standing | Ack):
            self._from_downstream(sender, message)
        elif self._is_upstream(sender, message):
            self._from_upstream(message)
        else:
            self.refused += 1

    def flush(self) -> None:
        """Acknowledge what the downstream has; called when all that has arrived is handled."""
        if self.upstream is not None and self._settled > self._reported:
            self._reported = self._settled
            self._owner.send(self.upstream, Ack(self.generation, self._reported))

    def send_part(self, peer: int, content: Any) -> bool:
        """Send a part of the snapshot; false: that copy does not need it any more."""
        if peer != self.downstream or self._down is not _Down.FILLING:
            return False
        self._send_down(FillPart(self.generation, content))
        return True

    def filled(self, peer: int) -> None:
        """Note that the whole snapshot was sent to a copy."""
        if peer == self.downstream and self._down is _Down.FILLING:
            self._down, self._may_be_in_sync = _Down.FOLLOWS, True
            self._send_down(FillEnd(self.generation))

    def _is_upstream(self, sender: int, message: Message) -> bool:
        if isinstance(message, Begin):
            is_next = sender != self.upstream and sender == self._neighbours(self._target)[0]
            if is_next and self._switch_at is not None and message.index >= self._switch_at:
                self._switch()  # the new primary has it, and so have all copies between
        return sender == self.upstream

    def _from_upstream(self, message: Message) -> None:
        assert self.upstream is not None
        if isinstance(message, Begin):
            index = EMPTY if self._is_partial else self.index
            self._owner.send(self.upstream, Standing(self.generation, index))
            self._reported = EMPTY  # this upstream has no acknowledgement yet
        elif isinstance(message, Forward):
            if message.entry.index == self.index + 1:
                self._append(message.entry)
        elif isinstance(message, FillStart):
            self._forget_all()
            self._is_partial = True
            self.applied.restore(message.index, message.clients)
        elif isinstance(message, FillPart):
            if self._is_partial:
                self._owner.restore(message.content)
        elif isinstance(message, FillEnd):
            self._is_partial = False
            if self.role is Role.FILLING:
                self._owner.in_sync(message.generation)

    def _from_downstream(self, sender: int, message: Standing | Ack) -> None:
        if sender != self.downstream:
            self.refused += 1
        elif isinstance(message, Standing):
            if self._down is _Down.GREETED:
                self._start(message.index)
        elif self._down in (_Down.FILLING, _Down.FOLLOWS):
            self._acked = max(self._acked, message.index)
            while self._kept and self._kept[0].index <= self._acked:
                self._kept.popleft()
            self._settle()

    def _start(self, index: int) -> None:
        """Start forwarding entries, from the index that the downstream has."""
        assert self.downstream is not None
        first = self._kept[0].index if self._kept else self.index + 1
        self._counts = True
        if first <= index + 1 and index != EMPTY:
            self._down, self._acked = _Down.FOLLOWS, index
            for entry in self._kept:
                if entry.index > index:
                    self._send_down(Forward(self.generation, entry))
            if self.downstream not in self._holders:
                self._may_be_in_sync = True
                self._send_down(FillEnd(self.generation))
        else:
            self._down, self._acked = _Down.FILLING, self.index
            self._may_be_in_sync = self.downstream in self._holders
            self._kept.clear()
            self._send_down(FillStart(self.generation, self.index, self.applied.outline()))
            self._owner.fill(self.downstream)
        self._settle()

    # -- entries ------------------------------------------------------------------------------

    def _append(self, entry: LogEntry) -> None:
        self.applied.note(entry.index, entry.rank, entry.seq)
        if self._counts:
            self._kept.append(entry)
            if self._down is not _Down.GREETED:
                self._send_down(Forward(self.generation, entry))
        if entry.op == HANDOVER:
            self._switch_at = entry.index
        else:
            self._owner.apply(entry)
        self._settle()

    @property
    def _settled(self) -> int:
        """The newest index that this copy and all after it have."""
        return self._acked if self._counts else self.index

    def _settle(self) -> None:
        settled = self._settled
        while self._deferred and self._deferred[0][0] <= settled:
            _, rank, seq, answer, extra = self._deferred.popleft()
            self._owner.deliver(rank, seq, answer, extra)
        if self._switch_at is not None and settled >= self._switch_at:
            self._switch()

    def _send_down(self, message: Message) -> None:
        assert self.downstream is not None
        self._owner.send(self.downstream, message)
