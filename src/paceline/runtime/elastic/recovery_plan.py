"""The recovery plan: from the statuses of all workers, which one sends state and what is repeated.

Pure: the simulation runs this very code.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.control.messages import Loss
from paceline.errors import ProtocolError


class WorkerStatus(msgspec.Struct, frozen=True):
    """What a worker sends to all others when they enter a new membership."""

    rank: int
    passed: int  # retryable steps
    adopted: int  # the last generation that it has entered completely
    workers: tuple[int, ...] = ()  # of that generation
    lost: tuple[Loss, ...] = ()  # since then
    is_new: bool = False
    settles: bool = False  # it has finished the step that it is in, unless others have passed it


class RecoveryPlan(msgspec.Struct, frozen=True):
    """What follows from all statuses; every worker computes the same plan."""

    passed: int  # retryable steps of all workers, once those behind have caught up
    source: int  # rank of the worker that sends its state
    before: tuple[int, ...]  # the workers that the source has worked with until now
    lost: tuple[Loss, ...]  # of them
    behind: tuple[int, ...]  # workers that have not passed the last step, which others have
    outdated: tuple[int, ...]  # workers that have not entered a generation, which others have
    newcomers: tuple[int, ...]

    @property
    def receivers(self) -> tuple[int, ...]:
        """The workers that need the source's state."""
        return tuple(dict.fromkeys((*self.behind, *self.outdated, *self.newcomers)))


def plan_recovery(statuses: Sequence[WorkerStatus]) -> RecoveryPlan:
    """Return the plan, from the statuses of all workers in order of their numbers."""
    old = [status for status in statuses if not status.is_new]
    if not old:
        raise ProtocolError(
            "all workers are newcomers: none has the training state; the job is over"
        )
    passed = max(status.passed for status in old)
    late = [status for status in old if status.passed < passed]
    if any(status.passed < passed - 1 for status in late):
        positions = {status.rank: status.passed for status in old}
        raise ProtocolError(
            f"workers are more than one retryable step apart: {positions} (by rank); they have"
            " taken different paths through the script"
        )
    # No worker passes a step before all have entered the generation before it, so the foremost in
    # generations are among the foremost in steps.
    adopted = max(status.adopted for status in old)
    source = next(s for s in old if (s.passed, s.adopted) == (passed, adopted))
    lost = {loss.rank: loss for status in old for loss in status.lost}
    # A step that can be finished by each worker alone is passed by meeting in the middle of it.
    is_settled = all(status.settles for status in old if status.passed == passed)
    return RecoveryPlan(
        passed=passed + is_settled,
        source=source.rank,
        before=source.workers,
        lost=tuple(lost[rank] for rank in source.workers if rank in lost),
        behind=tuple(status.rank for status in late),
        outdated=tuple(status.rank for status in old if status.adopted < adopted),
        newcomers=tuple(status.rank for status in statuses if status.is_new),
    )
