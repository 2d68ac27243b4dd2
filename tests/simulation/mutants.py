"""Broken variants of the cores. A simulation that does not find these would find nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.control.member import Membership
from paceline.control.membership.leases import FATAL_COST, LeaseFinding, Leases
from paceline.control.membership.lifecycle import Departures
from paceline.control.membership.roster import Roster
from paceline.control.messages import LossKind
from paceline.ps.client.failover import Content, PendingRequest, PendingRequests
from paceline.ps.replication.chain import FillStart, LogEntry, Message
from paceline.ps.replication.replication import Replica
from paceline.runtime.elastic.recovery_plan import RecoveryPlan, WorkerStatus, plan_recovery
from simulation.job import Cores
from simulation.lockstep import LockstepWorker, Part
from simulation.unit_worker import UnitWorker

# -- replication --------------------------------------------------------------------------------


class AnswersAtOnce(Replica):
    """Acknowledges before the backups have it."""

    def answer(self, rank: int, seq: int, answer: Any, extra: Any = None) -> None:
        super().answer(rank, seq, answer, extra)
        if self.is_open and self._deferred and self._deferred[-1][1:3] == (rank, seq):
            self._deferred.pop()
            self._owner.deliver(rank, seq, answer, extra)


class AppliesAgain(Replica):
    """Takes a request that is sent again for a new one."""

    def submit(self, rank: int, seq: int, op: Any) -> bool:
        self._append(LogEntry(self.index + 1, rank, seq, op))
        return True


class FillsWithoutAnswers(Replica):
    """Gives a new copy the values, but not what was answered to whom."""

    def _send_down(self, message: Message) -> None:
        if isinstance(message, FillStart):
            message = FillStart(message.generation, message.index, {})
        super()._send_down(message)


class ListensToAnybody(Replica):
    """Looks at nobody's generation: takes entries from a primary that was deposed."""

    def receive(self, sender: int, message: Message) -> None:
        super().receive(sender, msgspec.structs.replace(message, generation=self.generation))

    def _is_upstream(self, sender: int, message: Message) -> bool:
        super()._is_upstream(sender, message)
        self.upstream = sender
        return True


class ReadsAlone(Replica):
    """Answers reads from what it has, without asking the other copies whether it still may."""

    def submit(self, rank: int, seq: int, op: Any) -> bool:
        if op != ("read",):
            return super().submit(rank, seq, op)
        self._owner.deliver(rank, seq, "values", self._owner.table.values())  # type: ignore[attr-defined]
        return True


class OpensAtOnce(Replica):
    """Takes requests as soon as the membership says so, though the old primary may be ahead."""

    def adopt(self, generation: int, holders: Sequence[int], filling: Sequence[int] = ()) -> None:
        super().adopt(generation, holders, filling)
        if self.is_open or self.role.value == "primary":
            self._order = self._target


class HandsOverToNewcomers(Replica):
    """Lets a copy that has nothing take part in a handover."""

    def _order_after(self, before: tuple[int, ...]) -> tuple[int, ...]:
        staying = tuple(rank for rank in before if rank in self._target)
        return (*staying, *(rank for rank in self._target if rank not in staying))


class ForgetsOnLoss(Replica):
    """Does not pass on once more what a lost neighbour may not have passed on."""

    def _start(self, index: int) -> None:
        self._kept.clear()
        super()._start(max(index, self.index) if index >= 0 else index)


class StaysAlone(Replica):
    """Goes on as if it were alone when it is joined by another copy."""

    def adopt(self, generation: int, holders: Sequence[int], filling: Sequence[int] = ()) -> None:
        was_alone = self.is_alone
        super().adopt(generation, holders, filling)
        self.is_alone = self.is_open and (was_alone or self.is_alone)


# -- membership ---------------------------------------------------------------------------------


class PromotesTheFilling(Roster):
    """Believes that a copy is in sync as soon as it is asked to be."""

    def _calm_change(self) -> Any:
        assert self.membership is not None
        for partition, ranks in enumerate(self.membership.filling):
            self._synced |= {(partition, rank) for rank in ranks}
        return super()._calm_change()


class _Impatient(Leases):
    def _loss_reason(self, lease: Any, now_s: float) -> str | None:
        silent_s = now_s - lease.heard_s
        return "silent" if silent_s > self._policy.silent_s else None


class _Credulous(Leases):
    def heard(self, rank: int, now_s: float) -> list[LeaseFinding]:
        lease = self._leases.get(rank)
        stopped_s = None if lease is None else lease.stopped_s
        found = super().heard(rank, now_s)
        if lease is not None and stopped_s is not None and now_s - stopped_s > self._policy.lease_s:
            lease.heard_s = stopped_s
        return found


class BelievesAnOldLook(Roster):
    """Believes that a process is stopped, though it has been heard since."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leases.__class__ = _Credulous


class _Voters(Leases):
    def _choose_unreachable(self, now_s: float, cost: Callable[[int], int]) -> list[LeaseFinding]:
        standing = [
            pair
            for pair, (since_s, _) in self._unreachable.items()
            if now_s - since_s >= self._policy.accused_s and self._is_heard(pair, now_s)
        ]
        if not standing:
            return []
        votes = {rank: sum(of == rank for _, of in standing) for pair in standing for rank in pair}
        worst = max(votes, key=lambda r: (cost(r) < FATAL_COST, votes[r], -cost(r), r))
        return [
            LeaseFinding(
                worst, "lost", "most members report it as unreachable", LossKind.UNREACHABLE
            )
        ]


class CountsAccusers(Roster):
    """Takes every member for lost that is reported, however many its reporter reports."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leases.__class__ = _Voters


class EvictsTheSilent(Roster):
    """Takes everybody for lost who is silent, whatever the launcher sees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leases.__class__ = _Impatient


class LosesOne(Roster):
    """Lets the rest of a unit stay when one of it is lost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._departures.__class__ = _WithoutMates


class _WithoutMates(Departures):
    def unit_peers(self, *args: Any) -> list[Any]:
        del args
        return []


# -- clients ------------------------------------------------------------------------------------


class AsksUnderNewNumbers(PendingRequests[Content]):
    """Sends again what is unanswered, as if it were new."""

    def __iter__(self) -> Iterator[PendingRequest[Content]]:
        for asked in list(self._pending.values()):
            self._last += 1
            yield PendingRequest(self._last, asked.content)


class GivesUp(PendingRequests[Content]):
    """Does not send again what was under way when a server was lost."""

    def __iter__(self) -> Iterator[PendingRequest[Content]]:
        return iter(())


# -- lockstep -----------------------------------------------------------------------------------


def leaves_behind(statuses: Sequence[WorkerStatus]) -> RecoveryPlan:
    """Let those who are behind take a point alone that others have passed."""
    return msgspec.structs.replace(plan_recovery(statuses), behind=())


class PassesAlone(UnitWorker):
    """Passes a point when its own column has."""

    def _complete(self, result: frozenset[Part], due: int) -> None:
        LockstepWorker._complete(self, result, due)


class SettlesAlone(UnitWorker):
    """Goes on in a membership in which its mates may not be."""

    def _met(self, membership: Membership) -> None:
        self._seeks = False
        self._settle(membership)


@dataclass(frozen=True)
class Mutant:
    """Broken cores, and a seed that is known to find them."""

    cores: Cores
    seed: int


MUTANTS = {
    "answers at once": Mutant(Cores(replica=AnswersAtOnce), 9),
    "applies again": Mutant(Cores(replica=AppliesAgain), 10),
    "fills without answers": Mutant(Cores(replica=FillsWithoutAnswers), 147),
    "listens to anybody": Mutant(Cores(replica=ListensToAnybody), 9),
    "reads alone": Mutant(Cores(replica=ReadsAlone), 9),
    "opens at once": Mutant(Cores(replica=OpensAtOnce), 207),
    "forgets on loss": Mutant(Cores(replica=ForgetsOnLoss), 0),
    "applies again alone": Mutant(Cores(applies_again_alone=True), 10),
    "stays alone": Mutant(Cores(replica=StaysAlone), 9),
    "hands over to newcomers": Mutant(Cores(replica=HandsOverToNewcomers), 3166),
    "promotes the filling": Mutant(Cores(roster=PromotesTheFilling), 0),
    "evicts the silent": Mutant(Cores(roster=EvictsTheSilent), 11),
    "believes an old look": Mutant(Cores(roster=BelievesAnOldLook), 205),
    "counts accusers": Mutant(Cores(roster=CountsAccusers), 2180),
    "announces before it writes": Mutant(Cores(announces_first=True), 0),
    "asks under new numbers": Mutant(Cores(books=AsksUnderNewNumbers), 0),
    "gives up": Mutant(Cores(books=GivesUp), 0),
    "accuses once": Mutant(Cores(accuses_once=True), 87),
    "leaves behind": Mutant(Cores(plan_recovery=leaves_behind), 384),
    "loses one of a unit": Mutant(Cores(roster=LosesOne), 37),
    "passes points alone": Mutant(Cores(unit_worker=PassesAlone), 7),
    "settles alone": Mutant(Cores(unit_worker=SettlesAlone), 297),
}
