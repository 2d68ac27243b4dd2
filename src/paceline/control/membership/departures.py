"""Departures: the members that go in the next change, lost or in good order. Pure.

A worker goes with its unit (numbers.py). With `on_loss="replace"` the place of a lost worker stays
VACANT until a replacement is ready; all other losses are announced at once.

A worker that fails because it lost a peer is BEREFT: it may be the first to notice that a mate is
lost. The coordinator then waits a moment for that loss, with which the whole unit goes; if nobody
is missed, the loss is its own.
"""

from __future__ import annotations

import msgspec

from paceline.control.member import Member
from paceline.control.membership import changes
from paceline.control.membership import numbers as places
from paceline.control.membership.changes import who
from paceline.control.membership.decisions import State, Tell
from paceline.control.membership.policy import Policy
from paceline.control.transport import messages as m
from paceline.control.transport.messages import LossKind

_BEREFT_S = 1.0  # for the loss to be seen of which a member has died


class Departures:
    """The members that are listed in the present membership, and will not be in the next."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.left: dict[int, str] = {}  # by rank: in good order, in words
        self.losses: dict[int, m.Loss] = {}  # by rank
        self._bereft_s: dict[int, float] = {}  # by rank: until when the cause is waited for

    def has(self, rank: int, state: State) -> bool:
        """Return whether a member is gone, also if its place is held open."""
        is_vacant = any(loss.rank == rank for loss in state.vacant)
        return rank in self.losses or rank in self.left or is_vacant

    def clear(self) -> None:
        """Forget those who are in a change that is published."""
        self.left.clear()
        self.losses.clear()

    def lose(
        self, state: State, member: Member, why: str, kind: LossKind
    ) -> tuple[State, list[Tell]]:
        """Take note of a loss, and of those of the member's unit; return the state after it."""
        reason, kind_of_mate = places.because_of(who(member), why), places.kind_of_mate(kind)
        lost = [(member, why, kind)]
        lost += [(mate, reason, kind_of_mate) for mate in self.mates(state, member)]
        told = []
        for one, words, how in lost:
            loss = m.Loss(one.rank, one.number, one.role, one.where, words, how)
            if changes.is_held_open(self._policy, state, loss):
                state = msgspec.structs.replace(state, vacant=(*state.vacant, loss))
            elif self._policy.is_elastic:
                self.losses[one.rank] = loss
            standing = "left" if how.is_willing else "lost"
            told.append(Tell(m.Presence(one.rank, standing, words, one.where, how)))
        return state, told

    def mates(self, state: State, lost: Member) -> list[Member]:
        """Return the rest of a lost worker's unit: it cannot go on without that one.

        When workers are finishing, what the others have still to do they do by themselves.
        """
        is_over = state.is_finishing or not self._policy.is_elastic
        if lost.role != "worker" or self._policy.unit_size == 1 or is_over:
            return []
        assert state.membership is not None
        numbers = places.unit(self._policy, lost.number)
        return [
            one
            for one in state.membership.members
            if one.role == "worker"
            and one.number in numbers
            and one.rank != lost.rank
            and not self.has(one.rank, state)
        ]

    def breaks_its_unit(self, state: State, member: Member, *, is_finished: bool) -> bool:
        """Return whether others cannot go on without a member that leaves. Then it counts as lost,
        but is left to end by itself, with what it has to say."""
        has_mates = member.role == "worker" and self._policy.unit_size > 1
        is_missed = changes.is_wished(state, member) and not state.is_finishing
        return self._policy.is_elastic and has_mates and is_missed and not is_finished

    def await_cause(self, rank: int, now_s: float) -> None:
        """Give the loss of which a member has died a moment to be seen."""
        self._bereft_s[rank] = now_s + _BEREFT_S

    def overdue(self, now_s: float) -> list[int]:
        """Return, once each, those for whom that moment is over."""
        found = [rank for rank, until_s in self._bereft_s.items() if now_s >= until_s]
        for rank in found:
            del self._bereft_s[rank]
        return found
