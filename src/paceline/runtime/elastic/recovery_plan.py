"""From everybody's position: who gives state, who receives it, and what is done again.

Pure: the simulation runs this very code.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.control.transport.messages import Loss
from paceline.errors import ProtocolError


class Status(msgspec.Struct, frozen=True):
    """What a worker tells the others when they meet in a new membership."""

    rank: int
    passed: int  # points
    adopted: int  # the last change that it has gone through whole: a generation
    workers: tuple[int, ...] = ()  # of that generation
    lost: tuple[Loss, ...] = ()  # since then
    is_new: bool = False


class Verdict(msgspec.Struct, frozen=True):
    """What follows from all of them; everybody comes to the same."""

    passed: int  # where all are, once those behind have caught up
    donor: int  # rank
    before: tuple[int, ...]  # the workers that the donor has worked with until now
    lost: tuple[Loss, ...]  # of them
    behind: tuple[int, ...]  # workers that have not passed the last point, which others have
    outdated: tuple[int, ...]  # workers that have not gone through a change, which others have
    newcomers: tuple[int, ...]

    @property
    def receivers(self) -> tuple[int, ...]:
        """Those who need the donor's state."""
        return tuple(dict.fromkeys((*self.behind, *self.outdated, *self.newcomers)))


def judge(statuses: Sequence[Status]) -> Verdict:
    """Decide, from the statuses of all workers in order of their numbers."""
    old = [status for status in statuses if not status.is_new]
    if not old:
        raise ProtocolError(
            "all workers are newcomers: nobody has the state of the training; the job is over"
        )
    passed = max(status.passed for status in old)
    late = [status for status in old if status.passed < passed]
    if any(status.passed < passed - 1 for status in late):
        positions = {status.rank: status.passed for status in old}
        raise ProtocolError(
            f"workers are more than one point apart: {positions} (by rank); they have taken"
            " different paths through the script"
        )
    # Nobody passes a point before all have gone through the change before it, so the foremost in
    # changes are among the foremost in points.
    adopted = max(status.adopted for status in old)
    donor = next(s for s in old if (s.passed, s.adopted) == (passed, adopted))
    lost = {loss.rank: loss for status in old for loss in status.lost}
    return Verdict(
        passed=passed,
        donor=donor.rank,
        before=donor.workers,
        lost=tuple(lost[rank] for rank in donor.workers if rank in lost),
        behind=tuple(status.rank for status in late),
        outdated=tuple(status.rank for status in old if status.adopted < adopted),
        newcomers=tuple(status.rank for status in statuses if status.is_new),
    )
