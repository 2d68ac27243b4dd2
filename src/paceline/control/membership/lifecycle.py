"""Where each member stands: joining the first generation, entering the next ones, departing. Pure.

`FirstGeneration` collects the initial members. Ranks join in any order, and when the last one has
joined, the membership exists. A rank that disconnects before that frees its rank again.

`EnteredGenerations` knows which generation each member works in. Calm changes (changes.py) wait
until all of them have entered the present one. A worker counts as having entered it if it works in
a generation with the present workers: it finds the partitions by itself.

`Departures` has the members that leave in the next change. A worker leaves with its unit
(state.py). With `on_loss="replace"` the number of a lost worker stays VACANT until a replacement is
ready; all other losses are announced at once. A worker that fails because it lost a unit peer
(LOST_PEER) may be the first process to notice that loss. The coordinator then waits a moment for
it, and the whole unit leaves. If no other loss is seen, the worker itself counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from paceline.control import messages as m
from paceline.control.member import Member, Membership
from paceline.control.membership import changes
from paceline.control.membership.changes import describe
from paceline.control.membership.policy import Policy
from paceline.control.membership.state import (
    RosterState,
    unit_loss_kind,
    unit_loss_reason,
    unit_numbers,
)
from paceline.errors import RendezvousError

_EXPLAIN_AFTER_S = 2.0  # then the reason why a newcomer waits is printed
_RETIRE_S = 30.0  # for a removed worker to take its last step and exit
_PEER_LOSS_S = 1.0  # how long the loss of a peer may take to be seen


class FirstGeneration:
    """Collects one member per rank 0..world_size-1."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise RendezvousError(f"world size {world_size}: a job has at least 1 rank")
        self.world_size = world_size
        self.membership: Membership | None = None
        self._members: dict[int, Member] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank not in self._members)

    def add(self, member: Member) -> Membership | None:
        """Add a member; return the membership if it was the last one."""
        rank = member.rank
        if not 0 <= rank < self.world_size:
            raise RendezvousError(
                f"rank {rank} ({member.where}) is not in 0..{self.world_size - 1}:"
                f" this job has {self.world_size} ranks; check that all use the same world size"
            )
        if rank in self._members:
            raise RendezvousError(
                f"rank {rank} claimed twice ({self._members[rank].where}, {member.where});"
                " give every process its own rank, and every job its own job id"
            )
        self._members[rank] = member
        if not self.missing:
            members = tuple(self._members[rank] for rank in range(self.world_size))
            self.membership = Membership(generation=1, members=members)
        return self.membership

    def remove(self, rank: int) -> None:
        """Free the rank of a member that disconnected; no effect once the membership exists."""
        if self.membership is None:
            self._members.pop(rank, None)


class EnteredGenerations:
    """The generation that each member has entered, as the member reported it."""

    def __init__(self) -> None:
        self._entered: dict[int, int] = {}  # rank -> generation
        self._waiting_s: float | None = None  # since when newcomers wait

    def note(self, rank: int, generation: int) -> bool:
        """Note that a member has entered a generation; return whether that is new."""
        is_new = generation > self._entered.get(rank, 0)
        if is_new:
            self._entered[rank] = generation
        return is_new

    def forget(self, rank: int) -> None:
        self._entered.pop(rank, None)

    def late(self, now: Membership, is_present: Callable[[int], bool]) -> list[Member]:
        """Return the members that calm changes wait for."""
        return [
            one
            for one in now.members
            if is_present(one.rank)
            and self._entered.get(one.rank, 0)
            < (now.workers_since if one.role == "worker" else now.generation)
        ]

    def restart_wait(self) -> None:
        """Measure the newcomers' wait from now on: a change was published."""
        self._waiting_s = None

    def explain(
        self, newcomers: Mapping[int, Member], late: list[Member], generation: int, now_s: float
    ) -> str:
        """Return once, after a while, which members the newcomers wait for; else ""."""
        if not newcomers or self._waiting_s is None:
            self._waiting_s = now_s if newcomers else None
            return ""
        if now_s - self._waiting_s < _EXPLAIN_AFTER_S or not late:
            return ""
        self._waiting_s = float("inf")
        awaited = ", ".join(describe(one) for one in late)
        names = ", ".join(describe(one) for one in newcomers.values())
        return f"{names} will join when {awaited} works in generation {generation}"


class Departures:
    """The members of the present membership that will not be in the next one."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.left: dict[int, str] = {}  # by rank: members that exited cleanly, as text
        self.losses: dict[int, m.Loss] = {}  # by rank
        self._lost_peer_s: dict[int, float] = {}  # by rank: until when the cause is waited for
        self._retiring: dict[int, tuple[int, float]] = {}  # by rank: its number, and until when

    def has(self, rank: int, state: RosterState) -> bool:
        """Return whether a member has departed, also if its number is kept for a replacement."""
        is_vacant = any(loss.rank == rank for loss in state.vacant)
        return rank in self.losses or rank in self.left or is_vacant

    def clear(self) -> None:
        """Forget all departures: they are in a change that was published."""
        self.left.clear()
        self.losses.clear()

    def retire(self, removed: Iterable[Member], now_s: float) -> None:
        """Note that workers are out of the membership, and may still take their last step."""
        for one in removed:
            if one.role == "worker":
                self._retiring[one.rank] = one.number, now_s + _RETIRE_S

    def retired(self, rank: int) -> bool:
        """Note that a process has ended, or said goodbye; return whether it was to leave."""
        return self._retiring.pop(rank, None) is not None

    def is_retiring(self, rank: int) -> bool:
        """Return whether a worker is out of the membership and may take its last step."""
        return rank in self._retiring

    def retiring(self, now_s: float) -> set[int]:
        """Return the numbers of workers that may still take their last step."""
        return {number for number, until_s in self._retiring.values() if now_s < until_s}

    def lose(
        self, state: RosterState, member: Member, why: str, kind: m.LossKind
    ) -> tuple[RosterState, list[m.Presence]]:
        """Note the loss of a member and its unit peers; return the state after it."""
        reason, unit_kind = unit_loss_reason(describe(member), why), unit_loss_kind(kind)
        lost = [(member, why, kind)]
        lost += [(peer, reason, unit_kind) for peer in self.unit_peers(state, member)]
        presences = []
        for one, text, how in lost:
            loss = m.Loss(one.rank, one.number, one.role, one.where, text, how)
            if changes.is_held_open(self._policy, state, loss):
                state = msgspec.structs.replace(state, vacant=(*state.vacant, loss))
            elif self._policy.is_elastic:
                self.losses[one.rank] = loss
            standing = "left" if how.is_willing else "lost"
            presences.append(m.Presence(one.rank, standing, text, one.where, how))
        return state, presences

    def unit_peers(self, state: RosterState, lost: Member) -> list[Member]:
        """Return the other members of a lost worker's unit: they cannot continue without it.

        When workers are finishing, the others finish by themselves.
        """
        is_over = state.is_finishing or not self._policy.is_elastic
        if lost.role != "worker" or self._policy.unit_size == 1 or is_over:
            return []
        assert state.membership is not None
        numbers = unit_numbers(self._policy, lost.number)
        return [
            one
            for one in state.membership.members
            if one.role == "worker"
            and one.number in numbers
            and one.rank != lost.rank
            and not self.has(one.rank, state)
        ]

    def breaks_its_unit(self, state: RosterState, member: Member, *, is_finished: bool) -> bool:
        """Return whether unit peers cannot continue without a member that leaves. It then counts as
        lost, but may exit by itself and finish its output."""
        has_peers = member.role == "worker" and self._policy.unit_size > 1
        is_missed = changes.is_wanted(state, member) and not state.is_finishing
        return self._policy.is_elastic and has_peers and is_missed and not is_finished

    def await_cause(self, rank: int, now_s: float) -> None:
        """Wait a moment for the loss that made a member fail."""
        self._lost_peer_s[rank] = now_s + _PEER_LOSS_S

    def overdue(self, now_s: float) -> list[int]:
        """Return, once each, the members whose cause was not seen in time."""
        found = [rank for rank, until_s in self._lost_peer_s.items() if now_s >= until_s]
        for rank in found:
            del self._lost_peer_s[rank]
        return found


def retired_presence(rank: int, why: str, kind: m.LossKind = m.LossKind.ENDED) -> m.Presence:
    """Return the notice to all members about the end of a worker that was to leave. If only its
    connection ended, its farewell may not have arrived."""
    if kind is m.LossKind.ENDED:
        return m.Presence(rank, "left", why)
    return m.Presence(rank, "lost", why, kind=kind)
