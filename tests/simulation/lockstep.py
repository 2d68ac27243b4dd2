"""Simulated workers in lockstep: the production `plan_recovery` in a collective protocol.

A worker passes a step when it has the parts of all workers, so no worker is more than one step
ahead. If a worker is lost, the workers of the next membership exchange their step numbers,
`plan_recovery` decides which worker sends state to which, and the step is repeated from the parts
that were kept.

A part is (rank, point, cut): the samples of that point that were cut for that worker when the
workers were those of generation `cut`. Parts of one cut never overlap; so no sample counts twice as
long as all parts of a point are of one cut.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from paceline.control import messages as m
from paceline.control.member import Membership
from paceline.runtime.elastic.recovery_plan import RecoveryPlan, WorkerStatus
from simulation.member import SimMember
from simulation.network import End

if TYPE_CHECKING:
    from simulation.job import SimJob

Part = tuple[int, int, int]  # rank, point, cut


class CutStatus(WorkerStatus, frozen=True):
    """A status with the cut of the point under way."""

    cut: int = 0


class LockstepWorker(SimMember):
    """A worker that trains with all others."""

    def __init__(self, job: SimJob, *args: Any, **kwargs: Any) -> None:
        super().__init__(job, *args, **kwargs)
        self.log: list[frozenset[Part]] = []  # the result of every point passed
        self.settled: Membership | None = None  # the last one that was adopted whole
        self._cut = 0  # the workers' generation when the point under way was begun
        self._is_new = self.is_newcomer
        self._meeting: Membership | None = None
        self._verdict: RecoveryPlan | None = None
        self._next_cut = 0
        self._losses: dict[int, m.Loss] = {}
        self._peers: dict[int, End] = {}
        self._broken: set[int] = set()
        self._missed: set[int] = set()  # ranks that the coordinator calls lost
        self._heard: dict[tuple[str, int, int], dict[int, Any]] = defaultdict(dict)
        self._is_unwanted = False
        self._is_under_way = False  # our part of the point was sent

    def circle(self, membership: Membership) -> tuple[int, ...]:
        """The workers of a membership that train the same parameters."""
        return membership.workers

    def acquaintances(self, membership: Membership) -> tuple[int, ...]:
        """The workers of a membership that this one speaks with."""
        return membership.workers

    @property
    def unit(self) -> int:
        """The name under which its samples count."""
        return self.rank

    @property
    def additions(self) -> int:
        return len(self.log)

    # -- the mesh -----------------------------------------------------------------------------

    def on_membership(self, membership: Membership) -> None:
        for peer in self.acquaintances(membership):
            if self.rank < peer and peer not in self._peers and peer not in self._broken:
                name = self.job.by_rank[peer].name
                self.network.connect(self, name, f"pair {self.rank} {peer}", pulses=True)
        if self.settled is None and not self._is_new:
            self._settle(membership)
        elif self._meeting is not None or self._is_new or self._has_lost(membership):
            self._look_for_change()
        elif self.settled is not None and self.settled.workers_since == membership.workers_since:
            self.adopt()

    def _has_lost(self, membership: Membership) -> bool:
        assert self.settled is not None
        return any(rank not in membership.ranks for rank in self.circle(self.settled))

    def on_changed(self, changed: m.Changed) -> None:
        self._losses |= {loss.rank: loss for loss in changed.lost}

    def on_presence(self, presence: m.Presence) -> None:
        if presence.state == "lost":
            self._missed.add(presence.rank)
            self._fail(presence.rank)

    def on_unwanted(self) -> None:
        self._is_unwanted = True

    def _other(self, end: End) -> int:
        low, high = map(int, end.what.split()[1:])
        return high if low == self.rank else low

    def on_line(self, end: End) -> None:
        peer = self._other(end)
        self._peers[peer] = end
        for (kind, since, point), by_rank in self._heard.items():
            if self.rank in by_rank and kind != "parcel":  # said before there was a line
                end.send((kind, since, point, by_rank[self.rank]))

    def on_line_end(self, end: End, why: str) -> None:
        peer = self._other(end)
        self._peers.pop(peer, None)
        self._broken.add(peer)
        self.accuse_later(peer, f"the line is broken ({why})")
        self._fail(peer)

    def is_broken(self, rank: int) -> bool:
        return rank in self._broken

    def _say(self, kind: str, since: int, point: int, content: Any) -> None:
        """Say something to all workers of a membership, this one included."""
        for end in self._peers.values():
            end.send((kind, since, point, content))
        self._heard[kind, since, point][self.rank] = content

    def on_line_message(self, end: End, message: Any) -> None:
        kind, since, point, content = message
        self._heard[kind, since, point][self._other(end)] = content
        self._go_on()

    def _go_on(self) -> None:
        if self._meeting is not None:
            self._meet_on()
        elif self._is_under_way:
            self._try_to_pass()

    def _all(self, kind: str, membership: Membership, point: int) -> dict[int, Any] | None:
        said = self._heard[kind, membership.workers_since, point]
        return said if all(rank in said for rank in self.circle(membership)) else None

    # -- points -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Send our part of the next point, which may have been computed before."""
        assert self.settled is not None
        if self._is_under_way or self._meeting is not None:
            return
        if (self._broken | self._missed).intersection(self.circle(self.settled)):
            self._cannot_begin()
            return
        self._is_under_way = True
        point = len(self.log)
        self._cut = self._cut or self.settled.workers_since
        assert self.membership is not None
        due, part = self.membership.workers_since, (self.unit, point, self._cut)
        self._say("part", self.settled.workers_since, point, (part, due))
        self._go_on()

    def _try_to_pass(self) -> None:
        assert self.settled is not None
        point = len(self.log)
        parts = self._all("part", self.settled, point)
        if parts is None:
            return
        said = [parts[rank] for rank in self.circle(self.settled)]
        self._complete(frozenset(part for part, _ in said), min(due for _, due in said))

    def _complete(self, result: frozenset[Part], due: int) -> None:
        """All parts are there; `due` is the newest membership that all know of."""
        assert self.settled is not None
        self._pass(result)
        if due > self.settled.workers_since:
            self._look_for_change()  # agreed: all know of the next membership
        else:
            self.after(self.dice.uniform(0.02, 0.2), self._begin)

    def _pass(self, result: frozenset[Part]) -> None:
        assert self.settled is not None
        cuts = {cut for _, _, cut in result}
        self.oracle.require(
            len(cuts) == 1, "{}: point {} has parts of cuts {}", self.name, len(self.log), cuts
        )
        self.oracle.passed(self.settled.workers_since, len(self.log), result)
        self.log.append(result)
        self._is_under_way, self._cut = False, 0

    # -- changes ------------------------------------------------------------------------------

    def _cannot_begin(self) -> None:
        """Somebody of the circle is lost already."""
        self._look_for_change()

    def _fail(self, rank: int) -> None:
        """A collective operation cannot succeed any more if that rank takes part in it."""
        now = self._meeting or self.settled
        if now is not None and rank in self.circle(now):
            self._look_for_change()

    def _look_for_change(self) -> None:
        """Meet in the newest membership if it has other workers than the one that failed."""
        newest = self.membership
        assert newest is not None
        settled_since = 0 if self.settled is None else self.settled.workers_since
        since = settled_since if self._meeting is None else self._meeting.workers_since
        self._is_under_way = False
        if newest.workers_since > since:
            self._meeting = newest
            self._verdict = None
            self._say("status", newest.workers_since, 0, self._status(newest))
            self._meet_on()

    def _status(self, membership: Membership) -> WorkerStatus:
        workers = self.circle(self.settled) if self.settled is not None else ()
        gone = [rank for rank in workers if rank not in membership.ranks]
        return CutStatus(
            rank=self.rank,
            passed=len(self.log),
            adopted=self.settled.workers_since if self.settled is not None else 0,
            workers=workers,
            lost=tuple(self._losses[rank] for rank in gone if rank in self._losses),
            is_new=self._is_new,
            cut=self._cut,
        )

    def _meet_on(self) -> None:
        assert self._meeting is not None
        meeting, since = self._meeting, self._meeting.workers_since
        if self._verdict is None:
            statuses = self._all("status", meeting, 0)
            if statuses is None:
                return
            if all(status.is_new for status in statuses.values()):
                why = "every worker that had the training state was lost"
                self.oracle.over(why)
                self.exit(why)  # as ElasticSession._refuse_to_begin does
                return
            self._verdict = self.job.cores.plan_recovery(
                [statuses[rank] for rank in self.circle(meeting)]
            )
            # Whoever has begun the point has computed its part: the others follow that cut.
            begun = [s.cut for s in statuses.values() if s.passed == self._verdict.passed]
            self._next_cut = max(begun)
            if self._verdict.source == self.rank:
                for rank in self._verdict.receivers:
                    if rank in self._peers:
                        self._peers[rank].send(("parcel", since, 0, list(self.log)))
            if self.rank not in self._verdict.receivers:
                self._say("ready", since, 0, True)
        verdict = self._verdict
        is_ready = self.rank in self._heard["ready", since, 0]
        parcel = self._heard["parcel", since, 0].get(verdict.source)
        if not is_ready and parcel is not None:
            self.log = list(parcel)
            self._say("ready", since, 0, True)
        if self._all("ready", meeting, 0) is not None:
            self._meeting, self._cut = None, self._next_cut
            self.oracle.counted["changes in lockstep"] += 1
            self.oracle.counted["workers caught up"] += len(verdict.behind)
            self._met(meeting)

    def _met(self, membership: Membership) -> None:
        self._settle(membership)

    def _settle(self, membership: Membership) -> None:
        self.settled, self._is_new = membership, False
        self._heard = defaultdict(
            dict, {k: v for k, v in self._heard.items() if k[1] >= membership.workers_since}
        )
        self.adopted = max(self.adopted, membership.generation)
        self.tell("entered", self.adopted)
        if self._is_unwanted:
            self.leave(is_finished=False)
        else:
            self.after(self.dice.uniform(0.0, 0.1), self._begin)
