"""The roster: decides who is in the job. Pure: no I/O, no clock, no chance.

Every method takes what was learnt (and when), changes `state`, and returns decisions, which the
caller carries out in that order, after it has journaled `state` if that changed:

    journal(roster.state)  ->  carry out the decisions

A roster made again with `Roster(policy, state, now_s)` goes on where the other one ended; members
that are there attach again, newcomers say Ready again, servers say InSync again. What is not in
`state` (who adopted what, heartbeats, who is ready) is learnt anew from them.

Changes come in two kinds. URGENT ones are published at once: somebody is lost or left, or
replacements for all lost workers are ready. CALM ones wait until every member works in the present
generation: newcomers, filled backups, moves. So members see one calm change at a time, and an
urgent one may overtake it.

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

from paceline.cluster import messages as m
from paceline.cluster import places
from paceline.cluster.assembly import Assembly
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
)
from paceline.cluster.leases import UNBEARABLE, Finding, Leases
from paceline.cluster.member import Member, Membership
from paceline.cluster.partitions import Layout, filled, relieved, spread
from paceline.cluster.policy import Policy
from paceline.errors import Evicted, RendezvousError

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
        self._leaving: dict[int, str] = {}  # members that go in the next change: why they left
        self._losses: dict[int, m.Loss] = {}  # members that go in the next change: lost
        self._expiry_s = {place.rank: now_s + policy.reserve_s for place in self.state.reserved}
        self._wanted: set[Wanted] = set()
        self._unwanted: set[int] = set()
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
    def wanted(self) -> tuple[Wanted, ...]:
        """The places for which a process should be started, all of them."""
        return tuple(sorted(self._wanted, key=lambda w: (w.role, w.number)))

    @property
    def unwanted(self) -> tuple[int, ...]:
        """The members that were asked to leave and are still there."""
        return tuple(sorted(self._unwanted))

    @property
    def is_settled(self) -> bool:
        """Say whether every member works in the present generation."""
        membership = self.membership
        return membership is not None and not self._not_adopted(membership)

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
            layout = spread(self.policy.partitions, self.policy.replicas, _hosts(first))
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
        self, role: str, now_s: float, number: int | None = None
    ) -> tuple[Place, list[Decision]]:
        """Give away a rank, and the wanted or else the smallest free number of that role."""
        self._require_elastic("nobody can join")
        place, state = places.reserve(self.policy, self.state, role, number)
        self.state = state
        self._expiry_s[place.rank] = now_s + self.policy.reserve_s
        return place, self._settle(now_s)

    def ready(self, member: Member, now_s: float) -> list[Decision]:
        """Let a newcomer in as soon as that is possible: Announce names it as joined."""
        self._require_elastic("nobody can join")
        if self.state.is_finishing:
            raise RendezvousError(f"{_whom(member)} comes too late: the job is finishing")
        place = places.place_of(self.state, member.rank)
        if place is None or (place.role, place.number) != (member.role, member.number):
            raise RendezvousError(
                f"{_whom(member)} as rank {member.rank}: no such place is reserved; ask the"
                " coordinator for one (`paceline join`)"
            )
        self._candidates[member.rank] = member
        return self._settle(now_s)

    # -- going -------------------------------------------------------------------------------

    def lost(self, rank: int, why: str, now_s: float) -> list[Decision]:
        """Take in that a process or its connection ended without a word."""
        self._release(rank)
        if not self._is_here(rank):
            return self._settle(now_s)
        assert self.membership is not None
        member = self.membership.member(rank)
        loss = m.Loss(rank, member.number, member.role, member.where, why)
        self._leases.end(rank)
        told = Tell(m.Presence(rank, "lost", f"{member.where}: {why}"))
        if self.policy.is_elastic:
            if self._is_held_open(loss):
                self._remember(vacant=(*self.state.vacant, loss))
            else:
                self._losses[rank] = loss
        return [told, *self._settle(now_s)]

    def left(self, rank: int, now_s: float, *, is_finished: bool = True) -> list[Decision]:
        """Take in that a member ended in good order; `is_finished`: its work is done."""
        self._release(rank)
        if not self._is_here(rank):
            return self._settle(now_s)
        assert self.membership is not None
        member = self.membership.member(rank)
        self._leases.end(rank)
        told = Tell(m.Presence(rank, "left", "it ended in good order"))
        if self.policy.is_elastic:
            self._leaving[rank] = f"{_whom(member)} left"
            was_asked = rank in self._unwanted
            if member.role == "worker" and is_finished and not was_asked:
                self._remember(is_finishing=True)
        return [told, *self._settle(now_s)]

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
        if not self._is_here(rank):
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
            found = self._leases.check(now_s, self._cost)
            decisions += self._tell(f for f in found if f.state != "lost")
            for finding in found:
                if finding.state == "lost":
                    decisions += self.lost(finding.rank, finding.detail, now_s)
        for rank, until_s in list(self._expiry_s.items()):
            if now_s >= until_s and rank not in self._candidates:
                self._release(rank)
        return [*decisions, *self._settle(now_s), *self._explain_wait(now_s)]

    # -- wishes ------------------------------------------------------------------------------

    def scale(self, workers: int, now_s: float) -> list[Decision]:
        """Have that many workers from now on; UsageError outside of the bounds."""
        self._require_elastic("its size is fixed")
        self.state = places.scaled(self.policy, self.state, workers)
        return self._settle(now_s)

    def add_servers(self, count: int, now_s: float) -> list[Decision]:
        """Have more servers; partitions move to them when they are there."""
        self._require_elastic("its size is fixed")
        self.state = places.more_servers(self.policy, self.state, count)
        return self._settle(now_s)

    def remove_servers(self, numbers: Iterable[int], now_s: float) -> list[Decision]:
        """Empty these servers, then let them go."""
        self._require_elastic("its size is fixed")
        self.state = places.fewer_servers(self.policy, self.state, tuple(numbers))
        return self._settle(now_s)

    # -- deciding ----------------------------------------------------------------------------

    def _settle(self, now_s: float) -> list[Decision]:
        """Publish what can be published, and find out who is wanted."""
        if self.membership is None or self.state.over or not self.policy.is_elastic:
            return []
        decisions: list[Decision] = []
        changed = self._urgent(self.membership) or self._calm(self.membership)
        why = self._verdict(changed)
        if why:
            self._remember(over=why)
            return [End(why)]
        if changed is not None:
            decisions.append(self._publish(changed, now_s))
        return decisions + self._wishes()

    def _urgent(self, now: Membership) -> m.Changed | None:
        """The change that cannot wait: who is gone goes, and replacements of all come."""
        lost = dict(self._losses)
        kept = [loss for loss in self.state.vacant if self._is_held_open(loss)]
        lost |= {loss.rank: loss for loss in self.state.vacant if loss not in kept}
        by_number = {c.number: c for c in self._candidates.values() if c.role == "worker"}
        joined: list[Member] = []
        if kept and all(loss.number in by_number for loss in kept):
            joined = [by_number[loss.number] for loss in kept]
            lost |= {loss.rank: loss for loss in kept}
            kept = []
        if not lost and not self._leaving:
            return None
        self._remember(vacant=tuple(kept))
        gone = {*lost, *self._leaving}
        stay = [member for member in now.members if member.rank not in gone] + joined
        layout = filled(_layout(now).without(gone), self.policy.replicas, self._hosts(stay))
        vacant = tuple(loss.rank for loss in kept)
        after = now.next(stay, layout.holders, layout.filling, vacant)
        why = [*(f"{_place(loss)} lost: {loss.why}" for loss in lost.values())]
        why += [*self._leaving.values(), *(f"{_whom(one)} takes its place" for one in joined)]
        ranks = tuple(one.rank for one in joined)
        return m.Changed(after, tuple(lost.values()), ranks, "; ".join(why))

    def _calm(self, now: Membership) -> m.Changed | None:
        """The change that waits until everybody works in the present generation."""
        if self._not_adopted(now):
            return None
        held_open = {loss.number for loss in self.state.vacant}
        joined = [
            one
            for one in self._candidates.values()
            if one.role == "server" or one.number not in held_open
        ]
        members = [*now.members, *joined]
        layout = _layout(now)
        why = [f"{_whom(one)} joined" for one in joined]
        for partition, rank in sorted(self._synced):
            if rank in layout.filling[partition]:
                layout = layout.synced(partition, rank)
                why.append(f"partition {partition} has another copy")
        before = layout
        if layout.holders:
            hosts = {one.rank: one.host_id for one in _servers(members)}
            leaving = {one.rank for one in _servers(members) if not self._is_wished(one)}
            layout = relieved(layout, self.policy.replicas, hosts, leaving)
        if layout != before:
            why.append("partitions move")
        if not why:
            return None
        vacant = tuple(loss.rank for loss in self.state.vacant)
        after = now.next(members, layout.holders, layout.filling, vacant)
        return m.Changed(after, (), tuple(one.rank for one in joined), "; ".join(why))

    def _publish(self, changed: m.Changed, now_s: float) -> Decision:
        for rank in changed.joined:
            self._candidates.pop(rank)
            self._release(rank)
            self._leases.begin(rank, now_s)
        for rank in {*self._leaving, *(loss.rank for loss in changed.lost)}:
            self._adopted.pop(rank, None)
            self._unwanted.discard(rank)
        self._leaving.clear()
        self._losses.clear()
        filling = changed.membership.filling
        self._synced = {(p, rank) for p, rank in self._synced if rank in filling[p]}
        self._waiting_s = None
        self._remember(membership=changed.membership)
        return Announce(changed)

    def _verdict(self, changed: m.Changed | None) -> str:
        """Say why the job would be over after this change; "" when it would not."""
        after = self.membership if changed is None else changed.membership
        assert after is not None
        losses = (*(changed.lost if changed else ()), *self.state.vacant)
        if not losses:
            return ""
        gone = "; ".join(f"{_place(loss)} lost: {loss.why}" for loss in losses)
        nobodys = _layout(after).lost
        if nobodys:
            return (
                f"every copy of partition{'s' if len(nobodys) > 1 else ''}"
                f" {', '.join(map(str, nobodys))} of the servers' tables is lost ({gone});"
                " start the job again, with more --replicas"
            )
        vacant = {loss.rank for loss in self.state.vacant}
        alive = len(set(after.workers) - vacant)
        least = 1 if self.policy.on_loss == "replace" else self.policy.min_workers
        if self.state.is_finishing or alive >= least:
            return ""
        return (
            f"{alive} worker{' is' if alive == 1 else 's are'} left, expected at least {least}"
            f"{'' if self.policy.on_loss == 'replace' else ' (--min)'}: {gone}"
        )

    def _wishes(self) -> list[Decision]:
        """Find out which places lack a process, and which members are too many."""
        wanted = places.open_places(self.state)
        found: list[Decision] = [w for w in wanted if w not in self._wanted]
        self._wanted = set(wanted)
        assert self.membership is not None
        layout = _layout(self.membership)
        unwanted = {
            one.rank
            for one in self.membership.members
            if not self._is_wished(one) and (one.role == "worker" or not layout.load(one.rank))
        }
        found += [Unwanted(rank) for rank in sorted(unwanted - self._unwanted)]
        self._unwanted = unwanted
        return found

    # -- small things ------------------------------------------------------------------------

    def _remember(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def _require_elastic(self, else_what: str) -> None:
        if not self.policy.is_elastic:
            raise RendezvousError(
                f"this job is not elastic, {else_what}; start it with --min, --max or --on-loss"
            )

    def _is_here(self, rank: int) -> bool:
        gone = {*self._losses, *self._leaving, *(loss.rank for loss in self.state.vacant)}
        return self.membership is not None and rank in self.membership.ranks and rank not in gone

    def _is_held_open(self, loss: m.Loss) -> bool:
        """Say whether the others wait for a replacement of a lost worker."""
        return (
            loss.role == "worker"
            and self.policy.on_loss == "replace"
            and not self.state.is_finishing
            and loss.number in self.state.workers
        )

    def _is_wished(self, member: Member) -> bool:
        numbers = self.state.servers if member.role == "server" else self.state.workers
        return member.number in numbers

    def _not_adopted(self, membership: Membership) -> list[Member]:
        return [
            one
            for one in membership.members
            if self._is_here(one.rank) and self._adopted.get(one.rank, 0) < membership.generation
        ]

    def _hosts(self, members: Iterable[Member]) -> dict[int, str]:
        """The servers that may get more copies."""
        return {one.rank: one.host_id for one in _servers(members) if self._is_wished(one)}

    def _release(self, rank: int) -> None:
        """Give up the place of a newcomer that is a member now, or never will be."""
        self._candidates.pop(rank, None)
        if self._expiry_s.pop(rank, None) is not None:
            left = tuple(place for place in self.state.reserved if place.rank != rank)
            self._remember(reserved=left)

    def _cost(self, rank: int) -> int:
        """How bad the loss of a member would be, for choosing between two."""
        assert self.membership is not None
        layout = _layout(self.membership)
        if layout.without({rank}).lost:
            return UNBEARABLE
        workers = [one for one in self.membership.workers if self._is_here(one)]
        if rank in workers and len(workers) - 1 < self.policy.min_workers:
            return UNBEARABLE
        return layout.load(rank) + layout.primaries(rank)

    def _tell(self, found: Iterable[Finding]) -> list[Decision]:
        return [Tell(m.Presence(f.rank, f.state, f.detail)) for f in found]

    def _explain_wait(self, now_s: float) -> list[Decision]:
        """Say once, after a while, on whom a newcomer waits."""
        membership = self.membership
        if membership is None or not self._candidates or self.state.over:
            self._waiting_s = None
            return []
        if self._waiting_s is None:
            self._waiting_s = now_s
        late = self._not_adopted(membership)
        if now_s - self._waiting_s < _PATIENCE_S or not late:
            return []
        self._waiting_s = float("inf")
        newcomers = ", ".join(_whom(one) for one in self._candidates.values())
        whom = ", ".join(_whom(one) for one in late)
        text = f"{newcomers} will join when {whom} works in generation {membership.generation}"
        return [Remark(text)]


def _layout(membership: Membership) -> Layout:
    none: tuple[tuple[int, ...], ...] = ((),) * len(membership.partitions)
    return Layout(membership.partitions, membership.filling or none)


def _servers(members: Iterable[Member]) -> list[Member]:
    return sorted((one for one in members if one.role == "server"), key=lambda one: one.number)


def _hosts(membership: Membership) -> dict[int, str]:
    return {one.rank: one.host_id for one in _servers(membership.members)}


def _whom(member: Member) -> str:
    return f"{member.role} {member.number} ({member.where})"


def _place(loss: m.Loss) -> str:
    return f"{loss.role} {loss.number} ({loss.where})"
