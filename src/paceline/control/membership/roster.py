"""The roster: decides which processes are members of the job. Pure: no I/O, clock or randomness.

Every method takes what was learnt (and when), changes `state`, and returns decisions. The caller
carries them out in order, after it has journaled `state` if that changed:

    journal(roster.state)  ->  carry out the decisions

A roster made again with `Roster(policy, state, now_s)` continues where the other ended: members
attach again, newcomers send Ready again, servers send InSync again. What is not in `state`
(entered generations, heartbeats, ready newcomers) is learnt again from them.

Changes come in two kinds (changes.py): urgent ones are published at once, calm ones wait until
every member works in the present generation, so members see one of them at a time. The workers of a
unit (state.py) join in one change, and leave in one (lifecycle.py).

    learnt                              method
    an initial member connected         join (withdraw: it disconnected before all had joined)
    a process wants to join             reserve -> its rank and number
    it has set itself up                ready
    a message / the time                heard / tick
    a connection or process ended       lost (of a member, a newcomer or a reservation)
    a member exited cleanly             left
    a member entered a generation       entered
    it reconnected after a restart      attached
    it cannot reach another member      reported_unreachable
    a backup has caught up              in_sync
    the launcher sees a process         seen, launcher_heard
    an operator's request               scale, add_servers, remove_servers, plan_leave
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from paceline.control import messages as m
from paceline.control.member import Member, Membership
from paceline.control.membership import changes, lifecycle, planned_leave
from paceline.control.membership import state as numbers
from paceline.control.membership.changes import describe
from paceline.control.membership.leases import LeaseFinding, Leases
from paceline.control.membership.lifecycle import Departures, EnteredGenerations, FirstGeneration
from paceline.control.membership.policy import Policy
from paceline.control.membership.state import Decision, PaceRequest, Reservation, RosterState
from paceline.control.messages import LossKind
from paceline.errors import Evicted, RendezvousError, TooLate

_HANDLED = 32  # requests that are recognised when they are repeated


class Roster:
    """The members of one job. Not thread-safe."""

    def __init__(
        self, policy: Policy, state: RosterState | None = None, now_s: float = 0.0
    ) -> None:
        self.policy = policy
        self.state = state or numbers.initial_state(policy)
        self.first = FirstGeneration(policy.num_workers + policy.num_servers)
        self._leases = Leases(policy)
        self._candidates: dict[int, Member] = {}  # ready newcomers, by rank
        self._generations = EnteredGenerations()
        self._synced: set[tuple[int, int]] = set()  # (partition, rank) to be listed
        self._departures = Departures(policy)
        self.is_retiring = self._departures.is_retiring
        self._expiry_s = {one.rank: now_s + policy.reserve_s for one in self.state.reserved}
        self._wanted: set[m.Wanted] = set()
        self._quiet: RosterState | None = None  # for which there is no calm change
        if self.state.membership is not None:
            gone = {loss.rank for loss in self.state.vacant}
            for rank in self.state.membership.ranks:
                if rank not in gone:
                    self._leases.begin(rank, now_s, is_absent=True)

    @property
    def membership(self) -> Membership | None:
        """The announced membership; None while initial members are missing."""
        return self.state.membership

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of initial members that have not joined yet."""
        return self.first.missing if self.membership is None else ()

    @property
    def wanted(self) -> tuple[m.Wanted, ...]:
        """All processes that should be started."""
        return tuple(sorted(self._wanted, key=lambda w: (w.role, w.number)))

    @property
    def late(self) -> list[Member]:
        """The members that calm changes wait for: not in the present generation yet."""
        now = self.membership
        return [] if now is None else self._generations.late(now, self.is_present)

    # -- the first generation ----------------------------------------------------------------

    def join(self, member: Member, now_s: float) -> list[Decision]:
        """Add an initial member; RendezvousError if it does not belong to the job."""
        first = self.first.add(member)
        if first is None:
            return []
        for one in first.members:
            self._leases.begin(one.rank, now_s)
            self._generations.note(one.rank, first.generation)  # there is no older one to leave
        first = changes.place_partitions(self.policy, first)
        self._update(membership=first)
        changed = m.Changed(first, joined=first.ranks, why="all initial members have joined")
        return [changed, *self._decide(now_s)]

    def restart(self, now_s: float) -> None:
        """Begin with the first generation again: all members have left."""
        self.__init__(self.policy, None, now_s)  # type: ignore[misc]

    def withdraw(self, rank: int) -> None:
        """Free the rank of an initial member that disconnected before all had joined."""
        self.first.remove(rank)

    # -- joining -----------------------------------------------------------------------------

    def reserve(
        self, role: str, now_s: float, number: int | None = None, *, request: int = 0
    ) -> tuple[Reservation, list[Decision]]:
        """Reserve a rank, and a wanted or else the smallest free number of that role.

        A repeated `request` gets the same reservation.
        """
        self.policy.require_elastic("no process can join")
        for one in self.state.reserved:
            if request and one.request == request:
                return one, []
        reserved, state = numbers.reserve(self.policy, self.state, role, number, request)
        self.state = state
        for one in numbers.unit_reservations(self.policy, state, reserved.rank):
            self._expiry_s[one.rank] = now_s + self.policy.reserve_s
        return reserved, self._decide(now_s)

    def ready(self, member: Member, now_s: float) -> list[Decision]:
        """Admit a newcomer as soon as possible: a Changed names it as joined."""
        self.policy.require_elastic("no process can join")
        if self.is_present(member.rank):  # admitted before a restart, which it has not received
            return self.attached(member.rank, 0, now_s)
        if self.state.is_finishing or self.state.over:
            why = self.state.over or "its workers are finishing"
            raise TooLate(f"{describe(member)} is too late: the job is over: {why}")
        one = numbers.reservation_of(self.state, member.rank)
        if one is None or (one.role, one.number) != (member.role, member.number):
            raise RendezvousError(
                f"{describe(member)} as rank {member.rank}: no such reservation; ask the"
                " coordinator for one (`paceline join`)"
            )
        self._candidates[member.rank] = member
        return self._decide(now_s)

    # -- leaving -----------------------------------------------------------------------------

    def lost(
        self, rank: int, why: str, now_s: float, kind: LossKind = LossKind.ENDED
    ) -> list[Decision]:
        """Note that a process or its connection ended unexpectedly."""
        decisions = self._cancel_reservation(rank, why)
        if self._departures.retired(rank):
            decisions.append(lifecycle.retired_presence(rank, why, kind))
        if self.is_present(rank):
            assert self.membership is not None
            decisions += self._lose(self.membership.member(rank), why, kind)
        return [*decisions, *self._decide(now_s)]

    def _lose(self, member: Member, why: str, kind: LossKind) -> list[Decision]:
        self.state, presences = self._departures.lose(self.state, member, why, kind)
        for one in presences:
            self._leases.end(one.rank)
        return [*presences]

    def left(
        self, rank: int, now_s: float, *, is_finished: bool = True, has_lost_peer: bool = False
    ) -> list[Decision]:
        """Note that a member exited cleanly. `is_finished`: its work is done; `has_lost_peer`: it
        fails because it lost a peer."""
        decisions = self._cancel_reservation(rank, "it left before it was admitted")
        if self._departures.retired(rank):  # servers need not wait for its last step any more
            decisions.append(lifecycle.retired_presence(rank, "it left as planned"))
        if not self.is_present(rank):
            return [*decisions, *self._decide(now_s)]
        assert self.membership is not None
        member = self.membership.member(rank)
        if self._departures.breaks_its_unit(self.state, member, is_finished=is_finished):
            if has_lost_peer:
                self._leases.end(rank)
                self._departures.await_cause(rank, now_s)
            else:
                decisions += self._lose(member, "it left before its work was done", LossKind.LEFT)
            return [*decisions, *self._decide(now_s)]
        self._leases.end(rank)
        decisions.append(m.Presence(rank, "left", "it exited cleanly"))
        if self.policy.is_elastic:
            self._departures.left[rank] = f"{describe(member)} left"
            is_wanted = changes.has_wanted_number(self.state, member)
            if member.role == "worker" and is_finished and is_wanted:
                self._update(is_finishing=True)
        return [*decisions, *self._decide(now_s)]

    # -- signs of life -----------------------------------------------------------------------

    def heard(self, rank: int, now_s: float) -> list[Decision]:
        """Note any message of a member or of a joining process."""
        if rank in self._expiry_s:
            self._expiry_s[rank] = now_s + self.policy.reserve_s
        return self._presences(self._leases.heard(rank, now_s))

    def attached(self, rank: int, generation: int, now_s: float) -> list[Decision]:
        """Note that a member reconnected to a restarted coordinator; Evicted if it is none."""
        if self.membership is None:
            return []
        if not self.is_present(rank):
            raise Evicted(
                f"rank {rank} is not in generation {self.membership.generation} any more: it was"
                " taken for lost; start it again, as a newcomer",
                rank=rank,
            )
        return [*self.heard(rank, now_s), *self.entered(rank, generation, now_s)]

    def entered(self, rank: int, generation: int, now_s: float) -> list[Decision]:
        """Note that a member works in that generation."""
        if self._generations.note(rank, generation):
            self._leases.forget_reports(rank)
        return self._decide(now_s)

    def reported_unreachable(self, by: int, rank: int, why: str, now_s: float) -> None:
        """Note that member `by` cannot reach another; an empty `why` takes that back."""
        self._leases.report_unreachable(by, rank, why, now_s)

    def in_sync(self, rank: int, partition: int, generation: int, now_s: float) -> list[Decision]:
        """Note that a filling copy has caught up, and that the primary waits for its
        acknowledgement before every reply. A report from a generation with another primary does not
        count."""
        membership = self.membership
        if (
            membership is not None
            and partition in membership.fills(rank)
            and generation >= membership.primary_since(partition)
        ):
            self._synced.add((partition, rank))
        return self._decide(now_s)

    def launcher_heard(self, now_s: float | None) -> None:
        """Note a message of the launcher; None: it is gone, and its reports are void."""
        self._leases.launcher_heard(now_s)

    def seen(self, rank: int, now_s: float, *, stopped_since_s: float | None = None) -> None:
        """Note that the launcher sees a process run, or stopped for this many seconds."""
        since_s = None if stopped_since_s is None else now_s - stopped_since_s
        self._leases.seen(rank, since_s)

    def tick(self, now_s: float) -> list[Decision]:
        """Check all deadlines; call this a few times per second."""
        decisions: list[Decision] = []
        if self.membership is not None and not self.state.over:
            found = self._leases.check(
                now_s, lambda rank: changes.loss_cost(self.policy, self.state, rank)
            )
            decisions += self._presences(f for f in found if f.kind is None)
            for finding in found:
                if finding.kind is not None:
                    decisions += self.lost(finding.rank, finding.detail, now_s, finding.kind)
        for rank in self._departures.overdue(now_s):
            why = "it lost the connection to its unit"
            decisions += self.lost(rank, why, now_s, LossKind.LOST_PEER)
        for rank, until_s in list(self._expiry_s.items()):
            if now_s >= until_s and rank not in self._candidates:
                decisions += self._cancel_reservation(rank, "no process used its reservation")
        return [*decisions, *self._decide(now_s), *self._explain_wait(now_s)]

    # -- operators' requests -----------------------------------------------------------------

    def scale(self, workers: int, now_s: float) -> list[Decision]:
        """Have that many workers from now on; UsageError outside of the bounds."""
        self.policy.require_elastic("its size is fixed")
        self.state = numbers.scale_workers(self.policy, self.state, workers)
        return self._decide(now_s)

    def add_servers(self, count: int, now_s: float, *, request: int = 0) -> list[Decision]:
        """Have more servers; partitions move to them once they have joined."""
        self.policy.require_elastic("its size is fixed")
        if request and request in self.state.handled:
            return []
        self.state = numbers.add_servers(self.policy, self.state, count)
        self._update(handled=(*self.state.handled, request)[-_HANDLED:])
        return self._decide(now_s)

    def remove_servers(self, removed: Iterable[int], now_s: float) -> list[Decision]:
        """Move the partitions of these servers away, then let them leave."""
        self.policy.require_elastic("its size is fixed")
        self.state = numbers.remove_servers(self.policy, self.state, tuple(removed))
        return self._decide(now_s)

    def plan_leave(
        self, ranks: Collection[int], now_s: float, *, waits: bool, why: str = ""
    ) -> list[Decision]:
        """Let members leave whose host goes away, if `waits` when replacements are ready."""
        before, self.state = self.state, planned_leave.plan(self.policy, self.state, ranks, waits)
        return [*planned_leave.presences(before, self.state, why), *self._decide(now_s)]

    def withdraw_leave(self, ranks: Collection[int], now_s: float) -> list[Decision]:
        """Let members stay that were to leave and have not left yet."""
        before, self.state = self.state, planned_leave.withdraw(self.policy, self.state, ranks)
        return [*planned_leave.presences(before, self.state, "it stays"), *self._decide(now_s)]

    def set_pace_request(self, request: PaceRequest) -> None:
        """Keep a request for another pace; control/coordinator/pace_change.py decides about it."""
        self._update(pace_request=request)

    # -- deciding ----------------------------------------------------------------------------

    def _decide(self, now_s: float) -> list[Decision]:
        """Publish the next change if there is one, and find out which processes are wanted."""
        if self.membership is None or self.state.over or not self.policy.is_elastic:
            return []
        gone = (self._departures.losses, self._departures.left)
        following = changes.urgent_change(self.policy, self.state, *gone, self._candidates)
        if following is None and not self.late:
            following = self._calm_change(now_s)
        why = changes.reason_to_end(self.policy, self.state, following)
        if why:
            self._update(over=why)
            self._wanted = set()
            return [m.Over(why)]
        decisions = [] if following is None else self._publish(following, now_s)
        wanted = numbers.wanted_processes(self.state)
        decisions += [one for one in wanted if one not in self._wanted]
        self._wanted = set(wanted)
        return decisions

    def _calm_change(self, now_s: float) -> changes.NextMembership | None:
        if self.state is self._quiet and not self._candidates and not self._synced:
            return None  # computed before
        known = (self._candidates, self._synced, self._departures.retiring(now_s))
        following = changes.calm_change(self.policy, self.state, *known)
        if following is None:
            self._quiet = self.state
        return following

    def _publish(self, following: changes.NextMembership, now_s: float) -> list[Decision]:
        changed = following.changed
        for rank in changed.joined:
            self._release(rank)
            self._leases.begin(rank, now_s)
        lost = (loss.rank for loss in changed.lost)
        for rank in {*self._departures.left, *following.removed, *lost}:
            self._generations.forget(rank)
            self._leases.end(rank)
        assert self.membership is not None
        self._departures.clear()
        self._departures.retire(map(self.membership.member, following.removed), now_s)
        filling = changed.membership.filling
        self._synced = {(p, rank) for p, rank in self._synced if rank in filling[p]}
        self._generations.restart_wait()
        ranks = changed.membership.ranks
        leaving = tuple(one for one in self.state.leaving if one.rank in ranks)
        self._update(membership=changed.membership, vacant=following.vacant, leaving=leaving)
        return [changed, *(m.Unwanted(rank) for rank in following.removed)]

    # -- helpers -----------------------------------------------------------------------------

    def _update(self, **fields: object) -> None:
        self.state = msgspec.structs.replace(self.state, **fields)

    def is_present(self, rank: int) -> bool:
        """Return whether a member is listed and has not departed."""
        is_listed = self.membership is not None and rank in self.membership.ranks
        return is_listed and not self._departures.has(rank, self.state)

    def _release(self, rank: int) -> None:
        """Remove the reservation of a newcomer that is a member now, or never will be."""
        self._candidates.pop(rank, None)
        if self._expiry_s.pop(rank, None) is not None:
            left = tuple(one for one in self.state.reserved if one.rank != rank)
            self._update(reserved=left)

    def _cancel_reservation(self, rank: int, why: str) -> list[Decision]:
        """Remove the reservation of a newcomer that is gone, and those of its unit peers, which are
        notified."""
        first, *peers = numbers.unit_reservations(self.policy, self.state, rank) or (None,)
        if first is None:
            return []
        reason = numbers.unit_loss_reason(f"{first.role} {first.number}", why)
        for one in (first, *peers):
            self._release(one.rank)
        return [
            m.Presence(one.rank, "lost", reason, kind=LossKind.RETIRED)
            for one in peers
            if not one.is_open
        ]

    def _presences(self, found: Iterable[LeaseFinding]) -> list[Decision]:
        return [m.Presence(f.rank, f.state, f.detail) for f in found]

    def _explain_wait(self, now_s: float) -> list[Decision]:
        """Return once, after a while, which members a newcomer waits for."""
        if self.membership is None or self.state.over:
            return []
        known = (self._candidates, self.late, self.membership.generation)
        text = self._generations.explain(*known, now_s)
        return [m.Remark(text)] if text else []
