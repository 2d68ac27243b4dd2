"""Agreement inside a unit: its processes pass retryable steps and enter generations together.

On a mesh (runtime/mesh.py) each process takes its steps with its data-parallel group: the processes
that hold the same part of the model. If a worker is lost, the exchange of one group may be complete
and that of another not. A step of only a part of a model would be useless, so

    a step is passed          when the groups of all unit peers have passed it; else all repeat it
    a generation is entered   when all unit peers have entered it; a process that is in an older one
                              continues to the newer one
    a change begins           when a unit peer has received it, after the same step in all groups

Unit peers exchange their positions, a few numbers, after every attempt and every change. None of
them is lost in between: a process that has lost a unit peer is lost too
(control/membership/lifecycle.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.comm.fabric import Fabric
from paceline.comm.group import Group
from paceline.errors import ProtocolError

PASSED, FAILED, ENTERED = range(3)


class UnitPosition(NamedTuple):
    """Where one process of a unit is."""

    state: int
    since: int  # the generation of the workers that it works with
    passed: int  # retryable steps
    newest: int  # the generation of the newest workers that it has received
    wants_stop: int


class UnitVote:
    """One process's part in what its unit agrees on. Collective among the unit peers."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._group: Group | None = None
        self.newest = 0  # of any unit peer, at the last exchange
        self.wants_stop = False  # any unit peer, at the last exchange

    def exchange(self, mine: UnitPosition) -> list[UnitPosition]:
        """Return the positions of all unit peers."""
        if self._group is None:  # newcomers know each other by now
            ranks = self._fabric.membership.ranks
            self._group = Group(self._fabric, ranks, name=f"unit of rank {ranks[0]}", generation=1)
        received = [torch.empty(len(mine), dtype=torch.int64) for _ in self._group.ranks]
        self._group.all_gather(torch.tensor(mine), out=received)
        positions = [UnitPosition(*one.tolist()) for one in received]
        self.newest = max(one.newest for one in positions)
        self.wants_stop = any(one.wants_stop for one in positions)
        return positions

    def has_passed(self, mine: UnitPosition) -> bool:
        """Vote on a step that this process has passed or failed; return whether it counts."""
        positions = self.exchange(mine)
        if any((one.state, one.since) != (PASSED, mine.since) for one in positions):
            return False
        if any(one.passed != mine.passed for one in positions):
            ranks = self._fabric.membership.ranks
            counts = {rank: one.passed for rank, one in zip(ranks, positions, strict=True)}
            raise ProtocolError(
                f"rank {self._fabric.rank}: the processes of a unit have passed {counts} retryable"
                " steps (by rank); they have taken different paths through the script"
            )
        return True

    def is_together(self, mine: UnitPosition) -> bool:
        """Compare generations after a change; False: a unit peer is further, follow it."""
        while True:
            positions = self.exchange(mine)
            if max(one.since for one in positions) > mine.since:
                return False
            if all((one.state, one.since) == (ENTERED, mine.since) for one in positions):
                return True
