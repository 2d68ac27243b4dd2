"""The next membership, from the present state and who came and went: pure functions.

URGENT changes are published at once: somebody is lost or left, or replacements for all lost workers
are ready. CALM ones wait until every member works in the present generation: newcomers, members
that are no longer wished, filled backups, moves of partitions.

`happenings` says what a change means to people: typed events, from two memberships.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import msgspec

from paceline.control.member import Member, Membership
from paceline.control.membership import numbers as places
from paceline.control.membership.decisions import State
from paceline.control.membership.leases import UNBEARABLE
from paceline.control.membership.partitions import Layout, filled, relieved, spread
from paceline.control.membership.policy import Policy
from paceline.control.transport import messages as m
from paceline.observe.telemetry.events import (
    Filled,
    Happening,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Moved,
    Promoted,
)


class Next(msgspec.Struct, frozen=True):
    """A change to be published, and the vacant places after it."""

    changed: m.Changed
    vacant: tuple[m.Loss, ...]
    let_go: tuple[int, ...] = ()  # members that are no longer wished, and out now


def laid_out(policy: Policy, first: Membership) -> Membership:
    """Return the first membership of a job with its partitions shared out to the servers."""
    if not (policy.is_elastic and policy.partitions):
        return first
    hosts = {one.rank: one.host_id for one in servers(first.members)}
    layout = spread(policy.partitions, policy.replicas, hosts)
    return msgspec.structs.replace(first, partitions=layout.holders, filling=layout.filling)


def urgent(
    policy: Policy,
    state: State,
    losses: Mapping[int, m.Loss],
    left: Mapping[int, str],
    candidates: Mapping[int, Member],
) -> Next | None:
    """Who is gone goes, and replacements of all who are missed come; None: nothing is urgent."""
    now = _membership(state)
    lost = dict(losses)
    kept = [loss for loss in state.vacant if is_held_open(policy, state, loss)]
    lost |= {loss.rank: loss for loss in state.vacant if loss not in kept}
    by_number = {one.number: one for one in candidates.values() if one.role == "worker"}
    joined: list[Member] = []
    if kept and all(loss.number in by_number for loss in kept):
        joined = [by_number[loss.number] for loss in kept]
        lost |= {loss.rank: loss for loss in kept}
        kept = []
    if not lost and not left:
        return None
    gone = {*lost, *left}
    stay = [member for member in now.members if member.rank not in gone] + joined
    able = {one.rank: one.host_id for one in servers(stay) if is_wished(state, one)}
    layout = filled(layout_of(now).without(gone), policy.replicas, able)
    vacant = tuple(loss.rank for loss in kept)
    after = now.next(stay, layout.holders, layout.filling, vacant)
    why = _reasons(lost.values())
    why += [*left.values(), *(f"{who(one)} takes its place" for one in joined)]
    ranks = tuple(one.rank for one in joined)
    return Next(m.Changed(after, tuple(lost.values()), ranks, "; ".join(why)), tuple(kept))


def calm(
    policy: Policy,
    state: State,
    candidates: Mapping[int, Member],
    synced: Collection[tuple[int, int]],
) -> Next | None:
    """Who is ready comes, who is not wished goes, partitions move on; None: nothing to do."""
    now = _membership(state)
    layout = layout_of(now)
    held_open = {loss.number for loss in state.vacant}
    joined = [c for c in candidates.values() if c.role == "server" or c.number not in held_open]
    joined = places.whole(policy, joined)
    let_go = unwished(state)
    members = [one for one in now.members if one.rank not in let_go] + joined
    why = [f"{who(one)} joined" for one in joined]
    why += [f"{who(now.member(rank))} is no longer wanted" for rank in let_go]
    for partition, rank in sorted(synced):
        if rank in layout.filling[partition]:
            layout = layout.synced(partition, rank)
            why.append(f"partition {partition} has another copy")
    before = layout
    if layout.holders:
        hosts = {one.rank: one.host_id for one in servers(members)}
        leaving = {one.rank for one in servers(members) if not is_wished(state, one)}
        layout = relieved(layout, policy.replicas, hosts, leaving, len(state.servers))
    if layout != before:
        why.append("partitions move")
    if not why:
        return None
    vacant = tuple(loss.rank for loss in state.vacant)
    after = now.next(members, layout.holders, layout.filling, vacant)
    ranks = tuple(one.rank for one in joined)
    return Next(m.Changed(after, (), ranks, "; ".join(why)), state.vacant, let_go)


def verdict(policy: Policy, state: State, after: Next | None) -> str:
    """Say why the job would be over after this change; "" when it would not."""
    membership = _membership(state) if after is None else after.changed.membership
    vacant = state.vacant if after is None else after.vacant
    losses = (*(after.changed.lost if after else ()), *vacant)
    if not any(loss.kind.is_cause for loss in losses):
        return ""  # nobody, or their scripts have failed: the launcher ends the job
    gone = "; ".join(_reasons(losses))
    nobodys = layout_of(membership).lost
    if nobodys:
        return (
            f"every copy of partition{'s' if len(nobodys) > 1 else ''}"
            f" {', '.join(map(str, nobodys))} of the servers' tables is lost ({gone});"
            " start the job again, with more --replicas"
        )
    alive = len(set(membership.workers) - {loss.rank for loss in vacant})
    least = 1 if policy.on_loss == "replace" else policy.min_workers
    if state.is_finishing or alive >= least:
        return ""
    return (
        f"{alive} worker{' is' if alive == 1 else 's are'} left, expected at least {least}"
        f"{'' if policy.on_loss == 'replace' else ' (--min)'}: {gone}{_what_helps(policy, alive)}"
    )


def _what_helps(policy: Policy, alive: int) -> str:
    """Say what a job that has lost the state of its training should have been started with."""
    if alive:
        return ""
    other = (
        " a mesh with dp of at least 2, or with" if policy.num_workers == policy.unit_size else ""
    )
    other = other if policy.unit_size > 1 else ""
    return (
        "; nobody is left who has the state of the training: start the job again, with"
        f"{other} --restarts 1 and a checkpoint, from which it goes on by itself"
    )


def _reasons(losses: Iterable[m.Loss]) -> list[str]:
    """Name those who are lost by themselves; their mates only if nobody was."""
    losses = list(losses)
    causes = [loss for loss in losses if loss.kind.is_own]
    words = [f"{name_of(loss)} lost: {loss.why}" for loss in causes or losses]
    mates = len(losses) - len(causes)
    if causes and mates:
        words[-1] += f", and {mates} worker{'s' if mates > 1 else ''} with {_its(len(causes))}"
    return words


def _its(count: int) -> str:
    return "its unit" if count == 1 else "their units"


def cost(policy: Policy, state: State, rank: int) -> int:
    """How bad the loss of a member would be, for choosing between two."""
    now = _membership(state)
    layout = layout_of(now)
    if layout.without({rank}).lost:
        return UNBEARABLE
    workers = set(now.workers) - {loss.rank for loss in state.vacant}
    least = 1 if policy.on_loss == "replace" else policy.min_workers
    if rank in workers and len(workers) - policy.unit_size < least:
        return UNBEARABLE
    return layout.load(rank) + layout.primaries(rank)


def is_held_open(policy: Policy, state: State, loss: m.Loss) -> bool:
    """Say whether the others wait for a replacement of a lost worker."""
    return (
        loss.role == "worker"
        and policy.on_loss == "replace"
        and not state.is_finishing
        and loss.number in state.workers
    )


def is_wished(state: State, member: Member) -> bool:
    """Say whether the job wants to have a member's number."""
    return member.number in (state.servers if member.role == "server" else state.workers)


def unwished(state: State) -> tuple[int, ...]:
    """The members that can go: no longer wished, and no partition is with them."""
    now = _membership(state)
    layout, vacant = layout_of(now), {loss.rank for loss in state.vacant}
    return tuple(
        one.rank
        for one in now.members
        if not is_wished(state, one) and one.rank not in vacant and not layout.load(one.rank)
    )


def layout_of(membership: Membership) -> Layout:
    none: tuple[tuple[int, ...], ...] = ((),) * len(membership.partitions)
    return Layout(membership.partitions, membership.filling or none)


def servers(members: Iterable[Member]) -> list[Member]:
    """The servers among them, in order of their numbers."""
    return sorted((one for one in members if one.role == "server"), key=lambda one: one.number)


def who(member: Member) -> str:
    return f"{member.role} {member.number} ({member.where})"


def name_of(loss: m.Loss) -> str:
    return f"{loss.role} {loss.number} ({loss.where})"


def _membership(state: State) -> Membership:
    assert state.membership is not None, "the first crowd is not there yet"
    return state.membership


def happenings(before: Membership | None, changed: m.Changed) -> list[Happening]:
    """Say what happened between a membership and the one that follows it."""
    if before is None:
        return []  # the job has begun, which everybody sees
    now, found = changed.membership, list[Happening]()
    lost = {loss.rank for loss in changed.lost}
    generation = now.generation
    for loss in changed.lost:
        place = (loss.role, loss.number, loss.rank, loss.where)
        found.append(MemberLost(*place, loss.why, generation))
    for one in before.members:
        if one.rank not in now.ranks and one.rank not in lost:
            found.append(MemberLeft(one.role, one.number, one.rank, one.where, generation))
    found += _of_partitions(before, now)
    for rank in changed.joined:
        one = now.member(rank)
        found.append(MemberJoined(one.role, one.number, one.rank, one.where, generation))
    return found


def _of_partitions(before: Membership, now: Membership) -> list[Happening]:
    promoted: dict[int, list[int]] = defaultdict(list)
    moved: dict[tuple[int, int], list[int]] = defaultdict(list)
    filled: dict[int, list[int]] = defaultdict(list)
    for partition, (was, now_held) in enumerate(
        zip(before.partitions, now.partitions, strict=True)
    ):
        if was[:1] != now_held[:1] and now_held:
            if was[0] in now.ranks:
                moved[was[0], now_held[0]].append(partition)
            else:
                promoted[now_held[0]].append(partition)
        for rank in now_held:
            if rank not in was:
                filled[rank].append(partition)
    generation = now.generation

    def number(rank: int) -> int:
        return (now if rank in now.ranks else before).member(rank).number

    return [
        *(Promoted(number(r), tuple(ps), generation) for r, ps in promoted.items()),
        *(Filled(number(r), tuple(ps), generation) for r, ps in filled.items()),
        *(
            Moved(number(source), number(target), tuple(ps), generation)
            for (source, target), ps in moved.items()
        ),
    ]
