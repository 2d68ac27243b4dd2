"""Simulated workers of a mesh: columns in lockstep, and units that pass every point together.

A COLUMN exchanges parts as the workers of lockstep.py do. But a point is passed, and a change is
begun, only by the whole UNIT: whoever has all parts of its column, or cannot have them any more,
VOTES, and waits for the votes of its mates. After a change mates compare in ROUNDS where they are,
until all are in the same membership. Both are what runtime/elastic/unit_agreement.py does with real
workers.

A worker whose line to a mate breaks ends: in the middle of a forward pass nothing can be repeated.
"""

from __future__ import annotations

from typing import Any

from paceline.control.member import Membership
from simulation.lockstep import LockstepWorker, Part


class UnitWorker(LockstepWorker):
    """One place of one unit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._size = self.job.policy.unit_size
        self._votes = 0  # cast so far: the same number on all mates
        self._has_voted = False  # and waits for the others
        self._ballots: dict[int, dict[int, Any]] = {}  # by number of the vote, by rank
        self._outcome: tuple[frozenset[Part], int] | None = None  # of our own column
        self._in_round: Membership | None = None  # met in the column, not yet with the unit
        self._seeks = False  # for the next membership

    @property
    def unit(self) -> int:
        return self.rank - self.number % self._size  # the ranks of a unit are in a row

    def _mates(self) -> range:
        return range(self.unit, self.unit + self._size)

    def circle(self, membership: Membership) -> tuple[int, ...]:
        place = self.number % self._size
        numbers = {one.rank: one.number for one in membership.members}
        return tuple(r for r in membership.workers if numbers[r] % self._size == place)

    def acquaintances(self, membership: Membership) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.circle(membership), *self._mates())))

    # -- what mates say to each other ----------------------------------------------------------

    def on_line_end(self, end: Any, why: str) -> None:
        if self._other(end) in self._mates():
            self.crash("it has lost a mate")
        else:
            super().on_line_end(end, why)

    def on_line_message(self, end: Any, message: Any) -> None:
        kind, number, _, content = message
        if kind == "ballot":
            self._ballots.setdefault(number, {})[self._other(end)] = content
            self._count()
        else:
            super().on_line_message(end, message)

    def _vote(self, content: Any) -> None:
        self._has_voted = True
        self._ballots.setdefault(self._votes, {})[self.rank] = content
        for mate in self._mates():
            if mate in self._peers:
                self._peers[mate].send(("ballot", self._votes, 0, content))
        self._count()

    def on_line(self, end: Any) -> None:
        super().on_line(end)
        if self._other(end) in self._mates():
            for number, said in self._ballots.items():  # before there was a line
                if self.rank in said:
                    end.send(("ballot", number, 0, said[self.rank]))

    def _count(self) -> None:
        """Go on when all mates have said the same number of things."""
        said = self._ballots.get(self._votes, {})
        if not self._has_voted or len(said) < self._size:
            return
        self._has_voted = False
        self._votes += 1
        if self._in_round is not None:
            self._end_round(list(said.values()))
        elif all(due is not None for due in said.values()):
            assert self._outcome is not None
            result, self._outcome = self._outcome[0], None
            super()._complete(result, min(said.values()))
        else:
            self.oracle.counted["points failed by units"] += 1
            self._outcome = None
            self._seek()

    # -- points ---------------------------------------------------------------------------------

    def _complete(self, result: frozenset[Part], due: int) -> None:
        self._is_under_way = False
        self._outcome = (result, due)
        self._vote(due)

    def _cannot_begin(self) -> None:
        assert self.settled is not None
        self._cut = self._cut or self.settled.workers_since  # its mates have computed with it
        self._vote(None)

    def _fail(self, rank: int) -> None:
        if self._meeting is not None:
            super()._fail(rank)
        elif self._is_under_way and self.settled is not None and rank in self.circle(self.settled):
            self._is_under_way = False
            self._vote(None)

    # -- changes --------------------------------------------------------------------------------

    def _has_lost(self, membership: Membership) -> bool:
        del membership  # nobody goes over to it before its unit has failed in a point
        return self._seeks

    def _seek(self) -> None:
        self._seeks = True
        self._look_for_change()

    def _look_for_change(self) -> None:
        super()._look_for_change()
        if self._meeting is not None:
            self._seeks = False

    def _met(self, membership: Membership) -> None:
        self._in_round, self._seeks = membership, False
        self._vote(membership.workers_since)

    def _end_round(self, since: list[int]) -> None:
        assert self._in_round is not None
        met, mine = self._in_round, self._in_round.workers_since
        if min(since) == max(since):
            self._in_round = None
            self._settle(met)
        elif mine < max(since):
            self.oracle.counted["units met again"] += 1
            self._in_round, self.settled, self._is_new = None, met, False
            self._seek()
        else:
            self._vote(mine)
