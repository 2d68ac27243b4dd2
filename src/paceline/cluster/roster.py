"""The roster: decides who is in the job. Pure: no I/O, no clock, no chance.

Every method takes what was learnt (and when), changes `state`, and returns decisions, which the
caller carries out in that order, after it has journaled `state` if that changed:

    journal(roster.state)  ->  carry out the decisions

A roster made again with `Roster(policy, state, now_s)` goes on where the other one ended; members
that are there attach again, newcomers say Ready again, servers say InSync again. What is not in
`state` (who adopted what, heartbeats, who is ready) is learnt anew from them.

Changes come in two kinds (changes.py): urgent ones are published at once, calm ones wait until
every member works in the present generation. So members see one calm change at a time, and an
urgent one may overtake it. A worker counts as working in the present generation when it works in
one with the present workers: where partitions are it finds out by itself. The workers of a unit
(units.py) come in one change, and go in one.

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

from paceline.cluster import changes, places, units
from paceline.cluster import messages as m
from paceline.cluster.assembly import Assembly
from paceline.cluster.changes import who
from paceline.cluster.decisions import (
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
from paceline.cluster.leases import Finding, Leases
from paceline.cluster.member import Member, Membership
from paceline.cluster.messages import LossKind
from paceline.cluster.partitions import spread
from paceline.cluster.policy import Policy
from paceline.errors import Evicted, RendezvousError, TooLate

_HANDLED = 32  # wishes that are recognised when they come again
_BEREFT_S = 1.0  # for the loss to be seen of which a member has died
_PATIENCE_S = 2.0  # then the reason why a newcomer waits is told


class Roster:
    """The members of one job. Not thread-safe."""

    def __init__(self, policy: Policy, state: State | None = None, now_s: float = 0.0) -> None:
        self.policy = policy
        self.state = state or places.at_start(policy)
        self.assembly = Assembly(policy.num_workers + policy.num_servers)
        self._leases = Leases(policy)
        self._candidates: dict[int, Member] = {}  # ready newcomers, by rank
        self._adopted: dict[int, int] = {}  # rank -> generation
        self._synced: set[tuple[int, int]] = set()  # (partition, rank) to be listed
        self._left: dict[int, str] = {}  # members that go in the next change: in good order
        self._losses: dict[int, m.Loss] = {}  # members that go in the next change: lost
        self._bereft_s: dict[int, float] = {}  # left because of another: until when that is awaited
        self._expiry_s = {place.rank: now_s + policy.reserve_s for place in self.state.reserved}
        self._wanted: set[Wanted] = set()
        self._quiet: State | None = None  # for which nothing calm is to be done
        self._waiting_s: float | None = None  # since when a calm change waits
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
        return self.membership is not None and not self._not_adopted()

    @property
    def not_adopted(self) -> tuple[int, ...]:
        """The members that do not work in the present generation yet."""
        return () if self.membership is None else tuple(one.rank for one in self._not_adopted())

    # -- the first crowd ---------------------------------------------------------------------

    def join(self, member: Member, now_s: float) -> list[Decision]:
        """Seat a member of the first crowd; RendezvousError when it does not belong there."""
        first = self.assembly.add(member)
        if first is None:
            return []
        for one in first.members:
            self._leases.begin(one.rank, now_s)
            self._adopted[one.rank] = first.generation  # there is nothing older to be done with
        if self.policy.is_elastic and self.policy.partitions:
            hosts = {one.rank: one.host_id for one in changes.servers(first.members)}
            layout = spread(self.policy.partitions, self.policy.replicas, hosts)
            first = msgspec.structs.replace(
                first, partitions=layout.holders, filling=layout.filling
            )
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
        self._require_elastic("nobody can join")
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
        self._require_elastic("nobody can join")
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
        if not self.is_here(rank):
            return [*told, *self._settle(now_s)]
        assert self.membership is not None
        member = self.membership.member(rank)
        told += [self._lose(member, why, kind), *self._lose_mates(member, why, kind)]
        return [*told, *self._settle(now_s)]

    def _lose(self, member: Member, why: str, kind: LossKind) -> Decision:
        """Take note of a loss, which the next change is about."""
        loss = m.Loss(member.rank, member.number, member.role, member.where, why, kind)
        self._leases.end(member.rank)
        if self.policy.is_elastic:
            if changes.is_held_open(self.policy, self.state, loss):
                self._remember(vacant=(*self.state.vacant, loss))
            else:
                self._losses[member.rank] = loss
        state = "left" if kind.is_willing else "lost"
        return Tell(m.Presence(member.rank, state, why, member.where, kind))

    def _lose_mates(self, lost: Member, why: str, kind: LossKind) -> list[Decision]:
        """Give up the rest of a lost worker's unit: it cannot go on without it.

        When workers are finishing, what the others have still to do they do by themselves.
        """
        is_over = self.state.is_finishing or not self.policy.is_elastic
        if lost.role != "worker" or self.policy.unit_size == 1 or is_over:
            return []
        assert self.membership is not None
        numbers = units.unit(self.policy, lost.number)
        reason = units.because_of(who(lost), why)
        return [
            self._lose(one, reason, units.kind_of_mate(kind))
            for one in self.membership.members
            if one.role == "worker" and one.number in numbers and self.is_here(one.rank)
        ]

    def left(
        self, rank: int, now_s: float, *, is_finished: bool = True, is_bereft: bool = False
    ) -> list[Decision]:
        """Take in that a member ended in good order.

        `is_finished`: its work is done. `is_bereft`: it fails because it has lost a peer, and may
        be the first to notice. Then the coordinator waits a moment for the loss of that one, with
        which the whole unit goes.
        """
        told = self._give_up(rank, "it left before it was in")
        if not self.is_here(rank):
            return [*told, *self._settle(now_s)]
        assert self.membership is not None
        member = self.membership.member(rank)
        if self._breaks_its_unit(member, is_finished=is_finished):
            if is_bereft:
                self._leases.end(rank)
                self._bereft_s[rank] = now_s + _BEREFT_S
                return [*told, *self._settle(now_s)]
            why = "it left before its work was done"
            told += [self._lose(member, why, LossKind.LEFT)]
            told += self._lose_mates(member, why, LossKind.LEFT)
            return [*told, *self._settle(now_s)]
        self._leases.end(rank)
        told.append(Tell(m.Presence(rank, "left", "it ended in good order")))
        if self.policy.is_elastic:
            self._left[rank] = f"{who(member)} left"
            is_wished = changes.is_wished(self.state, member)
            if member.role == "worker" and is_finished and is_wished:
                self._remember(is_finishing=True)
        return [*told, *self._settle(now_s)]

    def _breaks_its_unit(self, member: Member, *, is_finished: bool) -> bool:
        """Say whether others cannot go on without one that leaves: then it counts as lost, but is
        left to end by itself, with what it has to say."""
        has_mates = member.role == "worker" and self.policy.unit_size > 1
        is_missed = changes.is_wished(self.state, member) and not self.state.is_finishing
        return self.policy.is_elastic and has_mates and is_missed and not is_finished

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
        if generation > self._adopted.get(rank, 0):
            self._adopted[rank] = generation
            self._leases.acquit(rank)
        return self._settle(now_s)

    def accused(self, by: int, rank: int, why: str, now_s: float) -> None:
        """A member cannot reach another; an empty `why` takes that back."""
        self._leases.accuse(by, rank, why, now_s)

    def in_sync(self, rank: int, partition: int, generation: int, now_s: float) -> list[Decision]:
        """A filling copy has everything that was and ever will be acknowledged without it.

        To be said only when from then on the primary sends no reply before this copy has
        acknowledged it: when the primary is lost the next moment, the copy takes over. What was
        said in a generation with another primary does not count.
        """
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
        for rank, until_s in list(self._bereft_s.items()):
            if now_s >= until_s:
                del self._bereft_s[rank]
                why = "it lost the connection to its unit"
                decisions += self.lost(rank, why, now_s, LossKind.BEREFT)
        for rank, until_s in list(self._expiry_s.items()):
            if now_s >= until_s and rank not in self._candidates:
                decisions += self._give_up(rank, "nobody came for its place")
        return [*decisions, *self._settle(now_s), *self._explain_wait(now_s)]

    # -- wishes ------------------------------------------------------------------------------

    def scale(self, workers: int, now_s: float) -> list[Decision]:
        """Have that many workers from now on; UsageError outside of the bounds."""
        self._require_elastic("its size is fixed")
        self.state = places.scaled(self.policy, self.state, workers)
        return self._settle(now_s)

    def add_servers(self, count: int, now_s: float, *, request: int = 0) -> list[Decision]:
        """Have more servers; partitions move to them when they are there."""
        self._require_elastic("its size is fixed")
        if request and request in self.state.handled:
            return []
        self.state = places.more_servers(self.policy, self.state, count)
        self._remember(handled=(*self.state.handled, request)[-_HANDLED:])
        return self._settle(now_s)

    def remove_servers(self, numbers: Iterable[int], now_s: float) -> list[Decision]:
        """Empty these servers, then let them go."""
        self._require_elastic("its size is fixed")
        self.state = places.fewer_servers(self.policy, self.state, tuple(numbers))
        return self._settle(now_s)

    def note(self, wish: Wish) -> None:
        """Keep what was wished about the pace, which is decided elsewhere (pace_change.py)."""
        self._remember(wish=wish)

    # -- deciding ----------------------------------------------------------------------------

    def _settle(self, now_s: float) -> list[Decision]:
        """Publish what can be published, and find out who is wanted."""
        if self.membership is None or self.state.over or not self.policy.is_elastic:
            return []
        facts = (self._losses, self._left, self._candidates)
        following = changes.urgent(self.policy, self.state, *facts)
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
        for rank in {*self._left, *following.let_go, *(loss.rank for loss in changed.lost)}:
            self._adopted.pop(rank, None)
            self._leases.end(rank)
        self._left.clear()
        self._losses.clear()
        filling = changed.membership.filling
        self._synced = {(p, rank) for p, rank in self._synced if rank in filling[p]}
        self._waiting_s = None
        self._remember(membership=changed.membership, vacant=following.vacant)
        return [Announce(changed), *(Unwanted(rank) for rank in following.let_go)]

    def _not_adopted(self) -> list[Member]:
        """The members on which calm changes wait."""
        now = self.membership
        assert now is not None
        return [
            one
            for one in now.members
            if self.is_here(one.rank)
            and self._adopted.get(one.rank, 0)
            < (now.workers_since if one.role == "worker" else now.generation)
        ]

    # -- small things ------------------------------------------------------------------------

    def _remember(self, **news: object) -> None:
        self.state = msgspec.structs.replace(self.state, **news)

    def _require_elastic(self, else_what: str) -> None:
        if not self.policy.is_elastic:
            raise RendezvousError(
                f"this job is not elastic, {else_what}; start it with --min, --max or --on-loss"
            )

    def is_here(self, rank: int) -> bool:
        """Say whether a member is there: listed, and neither lost nor gone."""
        gone = {*self._losses, *self._left, *(loss.rank for loss in self.state.vacant)}
        return self.membership is not None and rank in self.membership.ranks and rank not in gone

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
        reason = units.because_of(f"{first.role} {first.number}", why)
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
        if self.membership is None or not self._candidates or self.state.over:
            self._waiting_s = None
            return []
        if self._waiting_s is None:
            self._waiting_s = now_s
        late = self._not_adopted()
        if now_s - self._waiting_s < _PATIENCE_S or not late:
            return []
        self._waiting_s = float("inf")
        newcomers = ", ".join(who(one) for one in self._candidates.values())
        whom = ", ".join(who(one) for one in late)
        generation = self.membership.generation
        return [Remark(f"{newcomers} will join when {whom} works in generation {generation}")]
