"""What the coordinator has written down: the state, the changes that led to it, store and pools.

`keep` writes the state when it differs from what is written; it is called before anything is
announced. A member that comes back names the newest generation that it knows, and `missed` makes
one change of all that followed. Without a journal the record only remembers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.control.coordinator.journal import (
    MAX_BYTES,
    Entry,
    Header,
    Journal,
    PoolEntry,
    Recorded,
)
from paceline.control.coordinator.store import StoreService
from paceline.control.coordinator.work_pools import Pools
from paceline.control.member import Membership
from paceline.control.membership.decisions import State
from paceline.control.transport import messages as m

_HISTORY = 256  # changes that a member may have missed


@dataclass(frozen=True)
class Missed:
    """What happened while a member was away."""

    changed: m.Changed | None  # None: nothing
    lost: frozenset[int]
    is_known: bool  # the record reaches back so far


class Record:
    """The coordinator's memory, in its journal if it has one."""

    def __init__(
        self, journal: Journal | None, store: StoreService, pools: Pools | None = None
    ) -> None:
        self.state: State | None = None
        self.before: Membership | None = None  # the membership before the last `keep`
        self.num_replayed = 0
        self._history: deque[m.Changed] = deque(maxlen=_HISTORY)
        self._journal, self._store, self._pools = journal, store, pools or Pools()
        if journal is None:
            return
        for entry in journal.entries:
            if isinstance(entry, Recorded):
                self.state = entry.state
                self._history.extend(entry.changes)
                self.num_replayed += 1
            elif isinstance(entry, PoolEntry):
                self._pools.replay(entry)
            elif not isinstance(entry, Header):
                store.replay(entry)
        journal.entries.clear()
        store.note = lambda entry: journal.append(entry, sync=False)
        self._pools.note = lambda entry: journal.append(entry, sync=False)

    def begin(self, state: State) -> None:
        """Take the state with which a roster begins: it needs no writing."""
        self.state = state

    def keep(self, state: State, changes: tuple[m.Changed, ...]) -> None:
        """Write down a state that is new, and what will be announced with it."""
        self.before = None if self.state is None else self.state.membership
        if state is self.state or state == self.state:
            return
        if self._journal is not None:
            self._journal.append(Recorded(state, changes))
        self.state = state
        self._history.extend(changes)

    def missed(self, now: Membership, known: int) -> Missed:
        """Make one change of all those after generation `known`."""
        later = [one for one in self._history if one.membership.generation > known]
        if not later:
            return Missed(None, frozenset(), known >= now.generation)
        lost = {loss.rank: loss for one in later for loss in one.lost}
        joined = tuple(rank for one in later for rank in one.joined if rank in now.ranks)
        why = "; ".join(one.why for one in later if one.why)
        changed = m.Changed(now, tuple(lost.values()), joined, why)
        is_known = later[0].membership.generation <= known + 1
        return Missed(changed, frozenset(lost), is_known)

    def shorten(self) -> None:
        """Write a journal anew that has grown long."""
        if self._journal is not None and self._journal.size_bytes > MAX_BYTES:
            self._journal.rewrite(self._entries())

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _entries(self) -> Iterator[Entry]:
        if self.state is not None:
            yield Recorded(self.state, tuple(self._history))
        yield from self._store.entries()
        yield from self._pools.entries()
