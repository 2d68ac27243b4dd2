"""What the processes of a unit tell each other, so that they go through everything together.

On a mesh (runtime/mesh.py) each process takes its points with its column: those who hold the same
part of the model. When somebody is lost, the exchange of one column may be complete and that of
another not. A step that one part of a model has made and another has not would be of no use to
anybody, so

    a point is passed      when the columns of all mates have passed it; else all repeat it
    a change is adopted    when all mates have adopted it; who has met others in an older
                           membership goes on to the newer one
    a change begins        when some mate has heard of it, behind the same step in all columns

Mates tell each other where they are behind every attempt and every adoption: a few numbers. Nobody
is lost in between: who has lost a mate is lost too (control/membership/departures.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.comm.fabric import Fabric
from paceline.comm.group import Group
from paceline.errors import ProtocolError

PASSED, FAILED, ADOPTED = range(3)


class Ballot(NamedTuple):
    """Where one process is."""

    state: int
    since: int  # the workers that it works with: a generation
    passed: int  # points
    newest: int  # workers that it has heard of: a generation
    wants_stop: int


class UnitVote:
    """One process's part in what its unit agrees on. Collective among the mates."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._group: Group | None = None
        self.newest = 0  # of what any of them had heard of when they last told each other
        self.wants_stop = False  # the same

    def tell(self, mine: Ballot) -> list[Ballot]:
        """Return what all mates tell."""
        if self._group is None:  # newcomers have met by now
            ranks = self._fabric.membership.ranks
            self._group = Group(self._fabric, ranks, name=f"unit of rank {ranks[0]}", generation=1)
        told = [torch.empty(len(mine), dtype=torch.int64) for _ in self._group.ranks]
        self._group.all_gather(torch.tensor(mine), out=told)
        ballots = [Ballot(*one.tolist()) for one in told]
        self.newest = max(ballot.newest for ballot in ballots)
        self.wants_stop = any(ballot.wants_stop for ballot in ballots)
        return ballots

    def has_passed(self, mine: Ballot) -> bool:
        """Vote on a point that this process has passed, or failed in; say whether it counts."""
        ballots = self.tell(mine)
        if any((one.state, one.since) != (PASSED, mine.since) for one in ballots):
            return False
        if any(one.passed != mine.passed for one in ballots):
            counts = {rank: b.passed for rank, b in zip(self._ranks, ballots, strict=True)}
            raise ProtocolError(
                f"rank {self._fabric.rank}: the processes of a unit have passed {counts} points"
                " (by rank); they have taken different paths through the script"
            )
        return True

    def is_together(self, mine: Ballot) -> bool:
        """Compare memberships after an adoption; false: a mate is further, follow it."""
        while True:
            ballots = self.tell(mine)
            if max(one.since for one in ballots) > mine.since:
                return False
            if all((one.state, one.since) == (ADOPTED, mine.since) for one in ballots):
                return True

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self._fabric.membership.ranks
