"""A simulated coordinator: the production roster, a journal on a disk that survives it, and lines.

What it is told goes to the roster; what the roster decides is journaled, then carried out. The disk
keeps what was synced. A crash in the middle of writing leaves a torn entry, which counts as not
written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.control import messages as m
from paceline.control.coordinator.journal import CoordinatorState, Entry, Journal, _framed, _replay
from paceline.control.coordinator.store import StoreService
from paceline.control.member import Member
from paceline.control.membership.changes import removable_members
from paceline.control.membership.policy import Policy
from paceline.control.membership.roster import Roster
from paceline.control.membership.state import Decision
from paceline.errors import PacelineError, RendezvousError
from simulation.invariants import Oracle
from simulation.network import End, Network
from simulation.process import Process
from simulation.world import World

TICK_S = 0.2
LAST_WORDS_S = 0.2  # a process that has ended is not believed to be lost before this


class Disk:
    """A file that outlives its writer."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("journal")

    def __del__(self) -> None:
        os.close(self.fd)


class SimJournal(Journal):
    """The production journal on such a file."""

    def __init__(self, disk: Disk) -> None:
        self.path = Path("journal")
        self._fd = disk.fd
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.entries, size = _replay(self._fd, self.path)
        os.ftruncate(self._fd, size)
        os.lseek(self._fd, size, os.SEEK_SET)
        self.tear_at: float | None = None  # end within the next write: when this part is written

    def append(self, entry: Entry, *, sync: bool = True) -> None:
        data = _framed(entry)
        if self.tear_at is not None:
            length = min(round(self.tear_at * len(data)), len(data))
            os.write(self._fd, data[:length])
            raise Torn(f"killed when {length} of {len(data)} bytes of its journal were written")
        os.write(self._fd, data)


class Torn(Exception):
    """The writer of a journal was killed while it wrote."""


class SimCoordinator(Process):
    """The coordinator of a simulated job."""

    def __init__(
        self,
        world: World,
        network: Network,
        policy: Policy,
        oracle: Oracle,
        make: Callable[..., Roster] = Roster,
    ) -> None:
        super().__init__(world, network, "coordinator", "home")
        self.policy, self.oracle, self._make = policy, oracle, make
        self.disk = Disk()
        self.tear_at: float | None = None  # crash at the next write: this part of it is on disk
        self.announces_first = False  # a mutant: see mutants.py
        self.heard_s: dict[int, float] = {}  # by rank: its last sign of life; for the oracle

    def on_start(self) -> None:
        self._journal = SimJournal(self.disk)
        self._state = CoordinatorState(self._journal, StoreService())
        self.roster = self._make(self.policy, self._state.state, self.world.now_s)
        if self._state.state is not None:
            self.oracle.journaled(self._state.state)  # of a write that was torn at its very end
        self._lines: dict[int, End] = {}  # by rank
        self._ranks: dict[End, int] = {}
        self._launcher: End | None = None
        self.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self._carry_out(self.roster.tick(self.world.now_s))
        self.after(TICK_S, self._tick)

    # -- what it hears ------------------------------------------------------------------------

    def on_message(self, end: End, message: Any) -> None:
        verb, *args = message
        if end is self._launcher:
            self.roster.launcher_heard(self.world.now_s)
        rank = self._ranks.get(end)
        if rank is not None:
            self.heard_s[rank] = self.now
            self._carry_out(self.roster.heard(rank, self.world.now_s))
        try:
            getattr(self, f"_on_{verb}")(end, *args)
        except PacelineError as error:
            self.world.say(self.name, "refuses {} of {}: {}", verb, end.peer_name, error)
            end.send(("refused", type(error).__name__, str(error)))

    def on_end(self, end: End, why: str) -> None:
        if end is self._launcher:
            self._launcher = None
            self.roster.launcher_heard(None)
        rank = self._ranks.pop(end, None)
        if rank is None or self._lines.get(rank) is not end:
            return  # another connection of the same member has taken its place
        del self._lines[rank]
        if self.roster.membership is None:
            self.roster.withdraw(rank)
        else:
            self._carry_out(self.roster.lost(rank, f"its connection ended ({why})", self.now))

    @property
    def now(self) -> float:
        return self.world.now_s

    def _on_join(self, end: End, member: Member) -> None:
        if self.roster.membership is not None and self._state.num_replayed:
            # It had joined when the coordinator ended before it could say so.
            decisions = self.roster.attached(member.rank, 1, self.now)
            self._seat(end, member.rank)
            end.send(("joined", self.roster.membership))
        else:
            decisions = self.roster.join(member, self.now)
            self._seat(end, member.rank)
        self._carry_out(decisions)

    def _on_ready(self, end: End, member: Member) -> None:
        decisions = self.roster.ready(member, self.now)
        self._seat(end, member.rank)
        self._carry_out(decisions)
        membership = self.roster.membership
        if self.is_alive and membership is not None and member.rank in membership.ranks:
            end.send(("joined", membership))  # perhaps by the coordinator before this one

    def _on_attach(self, end: End, rank: int, generation: int, known: int) -> None:
        membership = self.roster.membership
        if membership is None:
            raise RendezvousError("the job is still forming")
        missed = self._state.missed(membership, known)
        decisions: list[Decision] = []
        if rank in membership.ranks or not missed.is_known or rank in missed.lost:
            decisions = self.roster.attached(rank, generation, self.now)
            self._seat(end, rank)
        if missed.changed is not None:
            end.send(("changed", missed.changed))
        for loss in self.roster.state.vacant:
            end.send(("presence", m.Presence(loss.rank, "lost", loss.why, loss.where, loss.kind)))
        end.send(("joined", membership))
        if self.roster.state.over:  # decided, but perhaps not told before a restart
            self.oracle.over(self.roster.state.over)
            end.send(("over", self.roster.state.over))
        self._carry_out(decisions)

    def _seat(self, end: End, rank: int) -> None:
        old = self._lines.get(rank)
        self._lines[rank], self._ranks[end], self.heard_s[rank] = end, rank, self.now
        if old is not None and old is not end:
            self._ranks.pop(old, None)
            old.close()

    def _on_heartbeat(self, end: End) -> None:
        pass

    def _on_entered(self, end: End, generation: int) -> None:
        if end in self._ranks:
            self._carry_out(self.roster.entered(self._ranks[end], generation, self.now))

    def _on_report_unreachable(self, end: End, rank: int, why: str) -> None:
        if end in self._ranks:
            self.roster.reported_unreachable(self._ranks[end], rank, why, self.now)

    def _on_in_sync(self, end: End, partition: int, generation: int) -> None:
        if end in self._ranks:
            rank = self._ranks[end]
            self._carry_out(self.roster.in_sync(rank, partition, generation, self.now))

    def _on_leave(self, end: End, is_finished: bool) -> None:
        rank = self._ranks.pop(end, None)
        if rank is not None:
            self._lines.pop(rank, None)
            self._carry_out(self.roster.left(rank, self.now, is_finished=is_finished))

    @property
    def unwanted(self) -> tuple[int, ...]:
        """The members that leave in the next calm change."""
        if self.roster.membership is None:
            return ()
        return removable_members(self.policy, self.roster.state)

    # -- the launcher -------------------------------------------------------------------------

    def _on_launcher(self, end: End) -> None:
        self._launcher = end
        self.roster.launcher_heard(self.now)
        for wanted in self.roster.wanted:
            end.send(("wanted", wanted.role, wanted.number))
        for rank in self.unwanted:
            end.send(("unwanted", rank))

    def _on_seen(self, end: End, rank: int, stopped_for_s: float | None) -> None:
        self.roster.seen(rank, self.now, stopped_since_s=stopped_for_s)

    def _on_exited(self, end: End, rank: int, why: str) -> None:
        self.after(LAST_WORDS_S if rank in self._lines else 0.0, self._believe, rank, why)

    def _believe(self, rank: int, why: str) -> None:
        if self.roster.membership is None:
            self.roster.withdraw(rank)
        self._carry_out(self.roster.lost(rank, why, self.now))

    def _on_reserve(self, end: End, role: str, number: int | None) -> None:
        place, decisions = self.roster.reserve(role, self.now, number)
        self._carry_out(decisions, before=lambda: end.send(("reserved", place)))

    def _on_wish(self, end: End, what: str, argument: Any) -> None:
        self._carry_out(getattr(self.roster, what)(argument, self.now))

    def _on_plan_leave(self, end: End, ranks: list[int], waits: bool) -> None:
        self._carry_out(self.roster.plan_leave(ranks, self.now, waits=waits))

    def _on_withdraw_leave(self, end: End, ranks: list[int]) -> None:
        self._carry_out(self.roster.withdraw_leave(ranks, self.now))

    # -- what it does -------------------------------------------------------------------------

    def _carry_out(
        self, decisions: list[Decision], before: Callable[[], None] = lambda: None
    ) -> None:
        if self.announces_first:
            before()
            self._perform_all(decisions)
            self._keep(decisions)
        elif self._keep(decisions):
            before()
            self._perform_all(decisions)

    def _keep(self, decisions: list[Decision]) -> bool:
        """Write the state if it changed; false: this process ended meanwhile."""
        changes = tuple(one for one in decisions if isinstance(one, m.Changed))
        before = self._state.state
        self._journal.tear_at = self.tear_at
        try:
            self._state.keep(self.roster.state, changes)
        except Torn as torn:
            self.tear_at = None
            self.crash(str(torn))
            return False
        if self._state.state is not before:
            self.oracle.journaled(self.roster.state)
        return True

    def _perform_all(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, m.Changed):
                self._announce(decision)
            elif isinstance(decision, m.Presence):
                self._tell(decision)
            elif isinstance(decision, m.Over):
                self.world.say(self.name, "says that the job is over: {}", decision.why)
                self.oracle.over(decision.why)
                self._broadcast(("over", decision.why))
            elif isinstance(decision, m.Wanted) and self._launcher is not None:
                self._launcher.send(("wanted", decision.role, decision.number))
            elif isinstance(decision, m.Unwanted):
                if self._launcher is not None:
                    self._launcher.send(("unwanted", decision.rank))
                if decision.rank in self._lines:
                    self._lines[decision.rank].send(("unwanted", decision.rank))

    def _announce(self, changed: m.Changed) -> None:
        self.world.say(self.name, "announces {}", _Brief(changed))
        self.oracle.announced(changed)
        self._broadcast(("changed", changed))
        if self._launcher is not None:
            self._launcher.send(("changed", changed))

    def _tell(self, presence: m.Presence) -> None:
        """Tell everybody how a member is; one that is lost hears it too, and is cut off."""
        self.world.say(self.name, "tells that rank {} is {}: {}", *_parts(presence))
        self._broadcast(("presence", presence), but=presence.rank)
        if presence.state in ("lost", "left"):
            end = self._lines.pop(presence.rank, None)
            if end is not None:
                self._ranks.pop(end, None)
                end.send(("presence", presence))
                end.close()

    def _broadcast(self, message: tuple[Any, ...], but: int = -1) -> None:
        for rank, end in list(self._lines.items()):
            if rank != but:
                end.send(message)


def _parts(presence: m.Presence) -> tuple[Any, ...]:
    return presence.rank, presence.state, presence.detail


class _Brief:
    """A change in few words, made only when somebody reads them."""

    def __init__(self, changed: m.Changed) -> None:
        self._changed = changed

    def __format__(self, spec: str) -> str:
        now = self._changed.membership
        return (
            f"generation {now.generation}: workers {list(now.workers)}, servers"
            f" {list(now.servers)}, partitions {list(map(list, now.partitions))}, filling"
            f" {list(map(list, now.filling))} ({self._changed.why})"
        )
