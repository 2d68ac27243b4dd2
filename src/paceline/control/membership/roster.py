"""The roster: decides who is in the job. Pure: no I/O, no clock, no chance.

Every method takes what was learnt (and when), changes `state`, and returns decisions, which the
caller carries out in that order, after it has journaled `state` if that changed:

    journal(roster.state)  ->  carry out the decisions

A roster made again with `Roster(policy, state, now_s)` goes on where the other one ended; members
that are there attach again, newcomers say Ready again, servers say InSync again. What is not in
`state` (who adopted what, heartbeats, who is ready) is learnt anew from them.

Changes come in two kinds (changes.py): urgent ones are published at once, calm ones wait until
every member works in the present generation. So members see one calm change at a time, and an
urgent one may overtake it (adoption.py). The workers of a unit (numbers.py) come in one change, and
go in one (departures.py).

    learnt                              method
    a rank of the first crowd came      join (withdraw: it went before all were there)
    somebody wants to come              reserve -> its rank and number
    it has done all it can do alone     ready
    a sign of life / none               heard / tick
    a connection or process ended       lost (of a member, a newcomer or a reserved place)
    a member ended in good order        left
    a member works in a generation      adopted
    it is back after a restart of ours  attached
    it cannot reach another             accused
    a filling copy has everything       in_sync
    the launcher looks at a process     seen, launcher_heard
    a person's wishes                   scale, add_servers, remove_servers
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paceline.control.coordinator.assembly import Assembly
from paceline.control.member import Member, Membership
from paceline.control.membership import changes
from paceline.control.membership import numbers as places
from paceline.control.membership.adoption import Adoption
from paceline.control.membership.changes import who
from paceline.control.membership.decisions import (
    Announce,
    Decision,
    End,
    Place,
    Remark,
    State,
    Tell,
    Unwanted,
    Wanted,
    Wish,
)
from paceline.control.membership.departures import Departures
from paceline.control.membership.leases import Finding, Leases
from paceline.control.membership.policy import Policy
from paceline.control.transport import messages as m
from paceline.control.transport.messages import LossKind
from paceline.errors import Evicted, RendezvousError, TooLate

_HANDLED = 32  # wishes that are recognised when they come again


class Roster:
    """The members of one job. Not thread-safe."""

    def __init__(self, policy: Policy, state: State | None = None, now_s: float = 0.0) -> None:
        self.policy = policy
        self.state = state or places.at_start(policy)
        self.assembly = Assembly(policy.num_workers + policy.num_servers)
        self._leases = Leases(policy)
        self._candidates: dict[int, Member] = {}  # ready newcomers, by rank
        self._adoption = Adoption()
        self._synced: set[tuple[int, int]] = set()  # (partition, rank) to be listed
        self._departures = Departures(policy)
        self._expiry_s = {place.rank: now_s + policy.reserve_s for place in self.state.reserved}
        self._wanted: set[Wanted] = set()
        self._quiet: State | None = None  # for which nothing calm is to be done
        if self.state.membership is not None:
            gone = {loss.rank for loss in self.state.vacant}
            for rank in self.state.membership.ranks:
                if rank not in gone:
                    self._leases.begin(rank, now_s, is_absent=True)

    @property
    def membership(self) -> Membership | None:
        """The announced membership; None while ranks of the first crowd are missing."""
        return self.state.membership

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the first crowd that have not come yet."""
        return self.assembly.missing if self.membership is None else ()

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """The places for which a process should be started, all of them."""
        return tuple(sorted(self._wanted, key=lambda w: (w.role, w.number)))

    @property
    def unwanted(self) -> tuple[int, ...]:
        """The members that are no longer wished, and go in the next calm change."""
        return () if self.membership is None else changes.unwished(self.state)

    @property
    def is_settled(self) -> bool:
        """Say whether every member works in the present generation."""
        return self.membership is not None and not self.late

    @property
    def late(self) -> list[Member]:
        """The members that calm changes wait for: not in the present generation yet."""
        now = self.membership
        return [] if now is None else self._adoption.late(now, self.is_here)

    # -- the first crowd ---------------------------------------------------------------------

    def join(self, member: Member, now_s: float) -> list[Decision]:
        """Seat a member of the first crowd; RendezvousError when it does not belong there."""
        first = self.assembly.add(member)
        if first is None:
            return []
        for one in first.members:
            self._leases.begin(one.rank, now_s)
            self._adoption.note(one.rank, first.generation)  # nothing older is to be done with
        first = changes.laid_out(self.policy, first)
        self._remember(membership=first)
        changed = m.Changed(first, joined=first.ranks, why="everybody is there")
        return [Announce(changed), *self._settle(now_s)]

    def withdraw(self, rank: int) -> None:
        """Free the place of a rank that went away before all were there."""
        self.assembly.remove(rank)

    # -- coming ------------------------------------------------------------------------------

    def reserve(
        self, role: str, now_s: float, number: int | None = None, *, request: int = 0
    ) -> tuple[Place, list[Decision]]:
        """Give away a rank, and the wanted or else the smallest free number of that role.

        Whoever asks again with the same `request` gets the same place.
        """
        self.policy.require_elastic("nobody can join")
        for place in self.state.reserved:
            if request and place.request == request:
                return place, []
        place, state = places.reserve(self.policy, self.state, role, number, request)
        self.state = state
        for mate in places.unit_places(self.policy, state, place.rank):
            self._expiry_s[mate.rank] = now_s + self.policy.reserve_s
        return place, self._settle(now_s)

    def ready(self, member: Member, now_s: float) -> list[Decision]:
        """Let a newcomer in as soon as that is possible: Announce names it as joined."""
        self.policy.require_elastic("nobody can join")
        if self.is_here(member.rank):  # let in before we were restarted, and not told so
            return self.attached(member.rank, 0, now_s)
        if self.state.is_finishing or self.state.over:
            why = self.state.over or "its workers are finishing"
            raise TooLate(f"{who(member)} comes too late: the job is over: {why}")
        place = places.place_of(self.state, member.rank)
        if place is None or (place.role, place.number) != (member.role, member.number):
            raise RendezvousError(
                f"{who(member)} as rank {member.rank}: no such place is reserved; ask the"
                " coordinator for one (`paceline join`)"
            )
        self._candidates[member.rank] = member
        return self._settle(now_s)

    # -- going -------------------------------------------------------------------------------

    def lost(
        self, rank: int, why: str, now_s: float, kind: LossKind = LossKind.ENDED
    ) -> list[Decision]:
        """Take in that a process or its connection ended without a word."""
        told = self._give_up(rank, why)
        if self.is_here(rank):
            assert self.membership is not None
            told += self._lose(self.membership.member(rank), why, kind)
        return [*told, *self._settle(now_s)]

    def _lose(self, member: Member, why: str, kind: LossKind) -> list[Decision]:
        self.state, told = self._departures.lose(self.state, member, why, kind)
        for one in told:
            self._leases.end(one.presence.rank)
        return [*told]

    def left(
        self, rank: int, now_s: float, *, is_finished: bool = True, is_bereft: bool = False
    ) -> list[Decision]:
        """Take in that a member ended in good order; `is_finished`: its work is done; `is_bereft`:
        it fails because it has lost a peer."""
        told = self._give_up(rank, "it left before it was in")
        if not self.is_here(rank):
            return [*told, *self._settle(now_s)]
        assert self.membership is not None
        member = self.membership.member(rank)
        if self._departures.breaks_its_unit(self.state, member, is_finished=is_finished):
            if is_bereft:
                self._leases.end(rank)
                self._departures.await_cause(rank, now_s)
            else:
                told += self._lose(member, "it left before its work was done", LossKind.LEFT)
            return [*told, *self._settle(now_s)]
        self._leases.end(rank)
        told.append(Tell(m.Presence(rank, "left", "it ended in good order")))
        if self.policy.is_elastic:
            self._departures.left[rank] = f"{who(member)} left"
            is_wished = changes.is_wished(self.state, member)
            if member.role == "worker" and is_finished and is_wished:
                self._remember(is_finishing=True)
        return [*told, *self._settle(now_s)]

    # -- being there -------------------------------------------------------------------------

    def heard(self, rank: int, now_s: float) -> list[Decision]:
        """Take in any sign of life, of members and of those on their way."""
        if rank in self._expiry_s:
            self._expiry_s[rank] = now_s + self.policy.reserve_s
        return self._tell(self._leases.heard(rank, now_s))

    def attached(self, rank: int, generation: int, now_s: float) -> list[Decision]:
        """A member came back to a coordinator that was restarted; Evicted when it is none."""
        if self.membership is None:
            return []
        if not self.is_here(rank):
            raise Evicted(
                f"rank {rank} is not in generation {self.membership.generation} any more: it was"
                " taken for lost; start it again, as a newcomer",
                rank=rank,
            )
        told = self.heard(rank, now_s)
        return [*told, *self.adopted(rank, generation, now_s)]

    def adopted(self, rank: int, generation: int, now_s: float) -> list[Decision]:
        """A member works in that generation."""
        if self._adoption.note(rank, generation):
            self._leases.acquit(rank)
        return self._settle(now_s)

    def accused(self, by: int, rank: int, why: str, now_s: float) -> None:
        """A member cannot reach another; an empty `why` takes that back."""
        self._leases.accuse(by, rank, why, now_s)

    def in_sync(self, rank: int, partition: int, generation: int, now_s: float) -> list[Decision]:
        """A filling copy has everything, and the primary sends no reply any more before that copy
        has acknowledged it. What was said in a generation with another primary does not count."""
        membership = self.membership
        if (
            membership is not None
            and partition in membership.fills(rank)
            and generation >= membership.primary_since(partition)
        ):
            self._synced.add((partition, rank))
        return self._settle(now_s)

    def launcher_heard(self, now_s: float | None) -> None:
        """Take in a sign of life of the launcher; None: it is gone, and its word is void."""
        self._leases.launcher_heard(now_s)

    def seen(self, rank: int, now_s: float, *, stopped_since_s: float | None = None) -> None:
        """The launcher sees a process run, or stopped for so many seconds."""
        since_s = None if stopped_since_s is None else now_s - stopped_since_s
        self._leases.seen(rank, since_s)

    def tick(self, now_s: float) -> list[Decision]:
        """Look at the clock; call this a few times per second."""
        decisions: list[Decision] = []
        if self.membership is not None and not self.state.over:
            found = self._leases.check(
                now_s, lambda rank: changes.cost(self.policy, self.state, rank)
            )
            decisions += self._tell(f for f in found if f.kind is None)
            for finding in found:
                if finding.kind is not None:
                    decisions += self.lost(finding.rank, finding.detail, now_s, finding.kind)
        for rank in self._departures.overdue(now_s):
            why = "it lost the connection to its unit"
            decisions += self.lost(rank, why, now_s, LossKind.BEREFT)
        for rank, until_s in list(self._expiry_s.items()):
            if now_s >= until_s and rank not in self._candidates:
                decisions += self._give_up(rank, "nobody came for its place")
        return [*decisions, *self._settle(now_s), *self._explain_wait(now_s)]

    # -- wishes ------------------------------------------------------------------------------

    def scale(self, workers: int, now_s: float) -> list[Decision]:
        """Have that many workers from now on; UsageError outside of the bounds."""
        self.policy.require_elastic("its size is fixed")
        self.state = places.scaled(self.policy, self.state, workers)
        return self._settle(now_s)

    def add_servers(self, count: int, now_s: float, *, request: int = 0) -> list[Decision]:
        """Have more servers; partitions move to them when they are there."""
        self.policy.require_elastic("its size is fixed")
        if request and request in self.state.handled:
            return []
        self.state = places.more_servers(self.policy, self.state, count)
        self._remember(handled=(*self.state.handled, request)[-_HANDLED:])
        return self._settle(now_s)

    def remove_servers(self, numbers: Iterable[int], now_s: float) -> list[Decision]:
        """Empty these servers, then let them go."""
        self.policy.require_elastic("its size is fixed")
        self.state = places.fewer_servers(self.policy, self.state, tuple(numbers))
        return self._settle(now_s)

    def note(self, wish: Wish) -> None:
        """Keep what was wished about the pace, which is decided elsewhere
        (control/coordinator/pace_change.py)."""
        self._remember(wish=wish)

    # -- deciding ----------------------------------------------------------------------------

    def _settle(self, now_s: float) -> list[Decision]:
        """Publish what can be published, and find out who is wanted."""
        if self.membership is None or self.state.over or not self.policy.is_elastic:
            return []
        gone = (self._departures.losses, self._departures.left)
        following = changes.urgent(self.policy, self.state, *gone, self._candidates)
        if following is None and self.is_settled:
            following = self._calm()
        why = changes.verdict(self.policy, self.state, following)
        if why:
            self._remember(over=why)
            self._wanted = set()
            return [End(why)]
        decisions = [] if following is None else self._publish(following, now_s)
        wanted = places.open_places(self.state)
        decisions += [one for one in wanted if one not in self._wanted]
        self._wanted = set(wanted)
        return decisions

    def _calm(self) -> changes.Next | None:
        if self.state is self._quiet and not self._candidates and not self._synced:
            return None  # looked through before
        following = changes.calm(self.policy, self.state, self._candidates, self._synced)
        if following is None:
            self._quiet = self.state
        return following

    def _publish(self, following: changes.Next, now_s: float) -> list[Decision]:
        changed = following.changed
        for rank in changed.joined:
            self._release(rank)
            self._leases.begin(rank, now_s)
        left = self._departures.left
        for rank in {*left, *following.let_go, *(loss.rank for loss in changed.lost)}:
            self._adoption.forget(rank)
            self._leases.end(rank)
        self._departures.clear()
        filling = changed.membership.filling
        self._synced = {(p, rank) for p, rank in self._synced if rank in filling[p]}
        self._adoption.settled()
        self._remember(membership=changed.membership, vacant=following.vacant)
        return [Announce(changed), *(Unwanted(rank) for rank in following.let_go)]

    # -- small things ------------------------------------------------------------------------

    def _remember(self, **news: object) -> None:
        self.state = msgspec.structs.replace(self.state, **news)

    def is_here(self, rank: int) -> bool:
        """Say whether a member is there: listed, and neither lost nor gone."""
        is_listed = self.membership is not None and rank in self.membership.ranks
        return is_listed and not self._departures.has(rank, self.state)

    def _release(self, rank: int) -> None:
        """Give up the place of a newcomer that is a member now, or never will be."""
        self._candidates.pop(rank, None)
        if self._expiry_s.pop(rank, None) is not None:
            left = tuple(place for place in self.state.reserved if place.rank != rank)
            self._remember(reserved=left)

    def _give_up(self, rank: int, why: str) -> list[Decision]:
        """Give up the place of a newcomer that is gone, and those of its mates, who are told."""
        first, *mates = places.unit_places(self.policy, self.state, rank) or (None,)
        if first is None:
            return []
        reason = places.because_of(f"{first.role} {first.number}", why)
        for place in (first, *mates):
            self._release(place.rank)
        return [
            Tell(m.Presence(one.rank, "lost", reason, kind=LossKind.RETIRED))
            for one in mates
            if not one.is_open
        ]

    def _tell(self, found: Iterable[Finding]) -> list[Decision]:
        return [Tell(m.Presence(f.rank, f.state, f.detail)) for f in found]

    def _explain_wait(self, now_s: float) -> list[Decision]:
        """Say once, after a while, on whom a newcomer waits."""
        if self.membership is None or self.state.over:
            return []
        generation = self.membership.generation
        text = self._adoption.explain(self._candidates, self.late, generation, now_s)
        return [Remark(text)] if text else []
