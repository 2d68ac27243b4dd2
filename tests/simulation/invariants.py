"""What must hold in every world, checked while things happen and once more at the end.

The oracle knows everything: what is on the coordinator's disk, what every client was told, what
every server has. It never tells the simulated processes anything.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from paceline.control import messages as m
from paceline.control.member import Membership
from paceline.control.membership.state import RosterState
from paceline.ps.replication.chain import Role
from simulation.world import Violation
from support.history import History, Sight, find_stale, find_violations

if TYPE_CHECKING:
    from simulation.job import SimJob
    from simulation.server import Copy, SimServer

_HOLDERS = (Role.PRIMARY, Role.BACKUP)
EXCUSE_S = 12.0  # so long after a fault of the network somebody may still be lost because of it


class Oracle:
    """Watches a job."""

    def __init__(self, job: SimJob) -> None:
        self.job, self.world = job, job.world
        self.history = History()
        self.end_of_job = ""
        self.counted: Counter[str] = Counter()  # what happened how often
        self.memberships: dict[int, Membership] = {}  # that were announced, by generation
        self._journaled: dict[int, Membership] = {}
        self._left: set[int] = set()
        self._answering: dict[tuple[int, int], int] = {}  # (partition, generation): rank
        self._issued: Counter[tuple[int, int]] = Counter()  # (partition, rank)
        self._acked: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._results: dict[tuple[int, int], frozenset[Any]] = {}
        self._sights: dict[int, list[Sight]] = defaultdict(list)
        self._network_s = -EXCUSE_S  # when the network was last at fault

    def require(self, holds: bool, text: str, *args: object) -> None:
        """Raise a Violation unless something holds."""
        if not holds:
            raise Violation(text.format(*args))

    # -- the coordinator ----------------------------------------------------------------------

    def journaled(self, state: RosterState) -> None:
        now = state.membership
        if now is None:
            return
        before = self._journaled.setdefault(now.generation, now)
        self.require(before == now, "generation {} is on disk twice, and differs", now.generation)

    def announced(self, changed: m.Changed) -> None:
        now = changed.membership
        self.require(
            self._journaled.get(now.generation, now) == now
            and max(self._journaled, default=0) >= now.generation,
            "generation {} is announced, but not on disk",
            now.generation,
        )
        newest = max(self.memberships, default=0)
        self.require(
            now.generation > newest, "generation {} is announced after {}", now.generation, newest
        )
        before = self.memberships.get(newest)
        self.memberships[now.generation] = now
        if before is not None:
            moved = zip(before.partitions, now.partitions, strict=True)
            self.counted["primaries changed"] += sum(a[0] != b[0] for a, b in moved)
        for partition, holders in enumerate(now.partitions):
            self.require(bool(holders), "partition {} is without a holder, but goes on", partition)
        causes = [loss for loss in changed.lost if loss.kind.is_own]
        for loss in causes or changed.lost:
            self._explain(loss)
        self._check_units(changed)

    def _check_units(self, changed: m.Changed) -> None:
        """Units come and go whole."""
        size, now = self.job.policy.unit_size, changed.membership
        numbers = set(now.worker_numbers)
        broken = [
            n for n in numbers if not numbers.issuperset(range(n - n % size, n - n % size + size))
        ]
        self.require(not broken, "generation {} has parts of units: {}", now.generation, broken)
        bases = {one.rank - one.number % size for one in now.members if one.role == "worker"}
        mixed = len(bases) * size != len(numbers)
        self.require(not mixed, "generation {} has units of several lives", now.generation)
        units = {loss.number // size for loss in changed.lost if loss.role == "worker"}
        self.counted["units lost"] += len(units)

    def _explain(self, loss: m.Loss) -> None:
        """Nobody may be lost without a reason."""
        self.counted[f"{loss.role}s lost"] += 1
        member = self.job.by_rank[loss.rank]
        if not member.is_alive or member.life > 1 or loss.rank in self._left:
            return
        long_s = 0.75 * self.job.policy.lease_s
        if member.paused_for_s >= long_s and member.state != "starved":
            return
        heard_s = self.job.coordinator.heard_s.get(loss.rank, 0.0)
        if member.last_pause_s >= long_s and heard_s < member.paused_s:
            return  # it has continued, but nobody could know
        if len(self.job.hosts()) > 1 and (
            member.paused_s > self.world.now_s - EXCUSE_S
            or self.job.network.faulty_s > self.world.now_s - EXCUSE_S
            or self.job.coordinator.paused_s > self.world.now_s - EXCUSE_S
        ):
            return
        raise Violation(f"{member.name} was well, but is taken for lost: {loss.why}")

    def over(self, why: str) -> None:
        self.end_of_job = why

    def left(self, rank: int) -> None:
        self._left.add(rank)

    # -- the servers --------------------------------------------------------------------------

    def acknowledged(self, rank: int, partition: int, generation: int) -> None:
        """A server lets an answer go."""
        first = self._answering.setdefault((partition, generation), rank)
        self.require(
            first == rank,
            "ranks {} and {} both answer for partition {} in generation {}",
            first,
            rank,
            partition,
            generation,
        )

    def look_at(self, server: SimServer, copy: Copy) -> None:
        """Compare a copy with the others of its generation."""
        mine = copy.replica
        if mine.role not in _HOLDERS or copy.table.absent or server.membership is None:
            return
        for rank in server.membership.partitions[copy.partition]:
            other: Any = self.job.by_rank[rank]
            theirs = other.copies.get(copy.partition) if other.is_alive else None
            if theirs is None or theirs is copy or theirs.table.absent:
                continue
            replica = theirs.replica
            if (replica.generation, replica.index) != (mine.generation, mine.index):
                continue
            if replica.role in _HOLDERS and (
                theirs.table.digest != copy.table.digest or theirs.table.counts != copy.table.counts
            ):
                raise Violation(
                    f"{server.name} and {other.name} differ in partition {copy.partition} at index"
                    f" {mine.index}"
                )

    # -- the clients --------------------------------------------------------------------------

    def began(
        self, rank: int, partition: int, kind: str, now_s: float, value: float | None = None
    ) -> int:
        return self.history.begin(rank, f"partition {partition} rank {rank}", kind, now_s, value)

    def ended(self, call: int, now_s: float, value: float | None = None) -> None:
        self.history.end(call, now_s, value)

    def issued(self, rank: int, partition: int, addition: int) -> None:
        self._issued[partition, rank] = addition

    def acked(self, rank: int, partition: int, addition: int) -> None:
        self._acked[partition, rank].add(addition)

    def saw(self, partition: int, sight: Sight) -> None:
        self._sights[partition].append(sight)

    def passed(self, since: int, point: int, result: frozenset[Any]) -> None:
        """A worker in lockstep has passed a point: with the same result as all others."""
        self.counted["points passed"] += 1
        before = self._results.setdefault((since, point), result)
        self.require(before == result, "point {} was passed as {} and as {}", point, before, result)

    def check_logs(self) -> None:
        """Every point was passed by all who are left in the same way, and is there once."""
        assert self.job.coordinator.roster.membership is not None
        logs = [self.job.by_rank[r].log for r in self.job.coordinator.roster.membership.workers]  # type: ignore[attr-defined]
        lengths = [len(log) for log in logs]
        self.require(max(lengths) - min(lengths) <= 1, "workers are apart: {}", lengths)
        for point in range(min(lengths)):
            found = {log[point] for log in logs}
            self.require(len(found) == 1, "workers differ at point {}: {}", point, found)

    def readable(self, partition: int, dice: random.Random) -> list[int]:
        """Choose clients whose cells to read."""
        ranks = sorted(rank for p, rank in self._issued if p == partition)
        return dice.sample(ranks, min(2, len(ranks)))

    @property
    def num_acked(self) -> int:
        return sum(map(len, self._acked.values()))

    # -- at the end ---------------------------------------------------------------------------

    def check_counts(self) -> None:
        """Nothing that was acknowledged is lost, and nothing was applied twice (O1)."""
        newest = self.job.coordinator.roster.membership
        assert newest is not None
        for partition, holders in enumerate(newest.partitions):
            for holder in holders:
                server = self.job.by_rank[holder]
                if server.is_alive:
                    self._check_copy(server.copies[partition], server.name)  # type: ignore[attr-defined]

    def _check_copy(self, copy: Copy, name: str) -> None:
        for (rank, addition), value in copy.table.cells.items():
            self.require(
                value == 1, "{} of rank {} was applied {} times on {}", addition, rank, value, name
            )
        for (partition, rank), acked in self._acked.items():
            if partition != copy.partition:
                continue
            lost = sorted(n for n in acked if (rank, n) not in copy.table.cells)
            self.require(
                not lost,
                "partition {} on {}: acknowledged additions {} of rank {} are lost",
                partition,
                name,
                lost,
                rank,
            )
            value, issued = copy.table.counts.get(rank, 0), self._issued[partition, rank]
            self.require(
                len(acked) <= value <= issued,
                "partition {} on {}: rank {} counted {}, acknowledged {}, issued {}",
                partition,
                name,
                rank,
                value,
                len(acked),
                issued,
            )

    def check_history(self) -> None:
        """Every answer fits into one order (O6), and nobody saw too little."""
        found = find_violations(self.history.calls)
        self.require(not found, "{}", "\n".join(found))
        bound = int(self.job.mode[4:]) if self.job.mode.startswith("ssp:") else None
        if bound is None:
            return
        for partition, sights in self._sights.items():
            # Workers come and go, and a newcomer begins at the slowest one's clock: what counts is
            # how far those were apart that took part when the answer was made.
            stale = find_stale([s for s in sights if len(s.seen) > 1], bound, lives=None)
            stale = [text for text in stale if "staler" in text]
            self.require(not stale, "partition {}: {}", partition, "\n".join(stale))
