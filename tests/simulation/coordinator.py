"""A simulated coordinator: the production roster, a journal on a disk that survives it, and lines.

What it is told goes to the roster; what the roster decides is journaled, then carried out. The disk
keeps what was synced. A crash in the middle of writing leaves a torn entry, which counts as not
written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from paceline.cluster import decisions as d
from paceline.cluster import messages as m
from paceline.cluster.policy import Policy
from paceline.cluster.roster import Roster
from paceline.errors import PacelineError
from simulation.invariants import Oracle
from simulation.network import End, Network
from simulation.process import Process
from simulation.world import World

TICK_S = 0.25


class Disk:
    """What is left of a journal when its writer crashes."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.torn = b""  # a part of an entry, at the end

    def append(self, entry: bytes) -> None:
        self.torn = b""  # whoever replays a journal cuts it off
        self.entries.append(entry)

    def tear(self, entry: bytes, length: int) -> None:
        self.torn = entry[:length]


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

    def on_start(self) -> None:
        state = None
        if self.disk.entries:
            state = msgspec.json.decode(self.disk.entries[-1], type=d.State)
        self.roster = self._make(self.policy, state, self.world.now_s)
        self._written = self.roster.state
        self._lines: dict[int, End] = {}  # by rank
        self._ranks: dict[End, int] = {}
        self._joining: dict[int, End] = {}  # newcomers and the first crowd, by rank
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
        self._joining.pop(rank, None)
        if self.roster.membership is None:
            self.roster.withdraw(rank)
        else:
            self._carry_out(self.roster.lost(rank, f"its connection ended ({why})", self.now))

    @property
    def now(self) -> float:
        return self.world.now_s

    def _on_join(self, end: End, member: Any) -> None:
        self._seat(end, member.rank)
        self._joining[member.rank] = end
        self._carry_out(self.roster.join(member, self.now))

    def _on_ready(self, end: End, member: Any) -> None:
        self._seat(end, member.rank)
        membership = self.roster.membership
        if membership is not None and member.rank in membership.ranks:
            # It was let in, but the coordinator ended before it could be told so.
            end.send(("changed", m.Changed(membership)))
            self._carry_out(self.roster.attached(member.rank, 0, self.now))
            return
        self._joining[member.rank] = end
        self._carry_out(self.roster.ready(member, self.now))

    def _on_attach(self, end: End, rank: int, generation: int) -> None:
        decisions = self.roster.attached(rank, generation, self.now)
        self._seat(end, rank)
        if self.roster.membership is not None:
            end.send(("changed", m.Changed(self.roster.membership)))
        self._carry_out(decisions)

    def _seat(self, end: End, rank: int) -> None:
        old = self._lines.get(rank)
        self._lines[rank], self._ranks[end] = end, rank
        if old is not None and old is not end:
            self._ranks.pop(old, None)
            old.close()

    def _on_heartbeat(self, end: End) -> None:
        pass

    def _on_adopted(self, end: End, generation: int) -> None:
        if end in self._ranks:
            self._carry_out(self.roster.adopted(self._ranks[end], generation, self.now))

    def _on_accuse(self, end: End, rank: int, why: str) -> None:
        if end in self._ranks:
            self.roster.accused(self._ranks[end], rank, why, self.now)

    def _on_in_sync(self, end: End, partition: int, generation: int) -> None:
        if end in self._ranks:
            rank = self._ranks[end]
            self._carry_out(self.roster.in_sync(rank, partition, generation, self.now))

    def _on_leave(self, end: End, is_finished: bool) -> None:
        rank = self._ranks.pop(end, None)
        if rank is not None:
            self._lines.pop(rank, None)
            self._carry_out(self.roster.left(rank, self.now, is_finished=is_finished))

    # -- the launcher -------------------------------------------------------------------------

    def _on_launcher(self, end: End) -> None:
        self._launcher = end
        self.roster.launcher_heard(self.now)
        for wanted in self.roster.wanted:
            end.send(("wanted", wanted.role, wanted.number))
        for rank in self.roster.unwanted:
            end.send(("unwanted", rank))

    def _on_seen(self, end: End, rank: int, stopped_for_s: float | None) -> None:
        self.roster.seen(rank, self.now, stopped_since_s=stopped_for_s)

    def _on_exited(self, end: End, rank: int, why: str) -> None:
        self._carry_out(self.roster.lost(rank, why, self.now))

    def _on_reserve(self, end: End, role: str, number: int | None) -> None:
        place, decisions = self.roster.reserve(role, self.now, number)
        self._carry_out(decisions, before=lambda: end.send(("reserved", place)))

    def _on_wish(self, end: End, what: str, argument: Any) -> None:
        self._carry_out(getattr(self.roster, what)(argument, self.now))

    # -- what it does -------------------------------------------------------------------------

    def _carry_out(
        self, decisions: list[d.Decision], before: Callable[[], None] = lambda: None
    ) -> None:
        if self.announces_first:
            before()
            self._perform_all(decisions)
            self._journal()
        elif self._journal():
            before()
            self._perform_all(decisions)

    def _journal(self) -> bool:
        """Write the state if it changed; false: this process ended meanwhile."""
        state = self.roster.state
        if state is self._written or state == self._written:
            return True
        entry = msgspec.json.encode(state)
        if self.tear_at is not None:
            length, self.tear_at = round(self.tear_at * len(entry)), None
            if length < len(entry):
                self.disk.tear(entry, length)
            else:
                self.disk.append(entry)
                self.oracle.journaled(state)
            self.crash(f"killed when {length} of {len(entry)} bytes of its journal were written")
            return False
        self.disk.append(entry)
        self._written = state
        self.oracle.journaled(state)
        return True

    def _perform_all(self, decisions: list[d.Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, d.Announce):
                self._announce(decision.changed)
            elif isinstance(decision, d.Tell):
                self.world.say(self.name, "tells that {}", decision.presence)
                self._broadcast(("presence", decision.presence), but=decision.presence.rank)
            elif isinstance(decision, d.End):
                self.world.say(self.name, "says that the job is over: {}", decision.why)
                self.oracle.over(decision.why)
                self._broadcast(("over", decision.why))
            elif isinstance(decision, d.Wanted) and self._launcher is not None:
                self._launcher.send(("wanted", decision.role, decision.number))
            elif isinstance(decision, d.Unwanted):
                if self._launcher is not None:
                    self._launcher.send(("unwanted", decision.rank))
                if decision.rank in self._lines:
                    self._lines[decision.rank].send(("unwanted", decision.rank))

    def _announce(self, changed: m.Changed) -> None:
        self.world.say(self.name, "announces {}", _Brief(changed))
        self.oracle.announced(changed)
        for rank in changed.joined:
            self._joining.pop(rank, None)
        self._broadcast(("changed", changed))
        if self._launcher is not None:
            self._launcher.send(("changed", changed))
        for loss in changed.lost:
            end = self._lines.pop(loss.rank, None)
            if end is not None:
                self._ranks.pop(end, None)
                end.send(("changed", changed))
                end.close()

    def _broadcast(self, message: tuple[Any, ...], but: int = -1) -> None:
        assert self.roster.membership is not None
        for rank, end in list(self._lines.items()):
            if rank != but and rank in self.roster.membership.ranks:
                end.send(message)


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
