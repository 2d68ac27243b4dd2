"""The next membership, from the present state and the members that join and leave: pure functions.

URGENT changes are published at once: a member is lost or left, or replacements for all lost workers
are ready. CALM changes wait until every member works in the present generation: newcomers, removed
members, backups that have caught up, moves of partitions.

`change_events` describes a change for people: typed events, from two memberships.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import msgspec

from paceline.control import messages as m
from paceline.control.member import Member, Membership
from paceline.control.membership.leases import FATAL_COST
from paceline.control.membership.partitions import (
    PartitionLayout,
    add_missing_copies,
    initial_layout,
    next_layout,
)
from paceline.control.membership.policy import Policy
from paceline.control.membership.state import RosterState, complete_units, unit_numbers
from paceline.observe.telemetry.events import (
    BackupCaughtUp,
    MemberJoined,
    MemberLeft,
    MemberLost,
    MembershipEvent,
    PartitionsMoved,
    Promoted,
)


class NextMembership(msgspec.Struct, frozen=True):
    """A change to be published, and the workers that are vacant after it."""

    changed: m.Changed
    vacant: tuple[m.Loss, ...]
    removed: tuple[int, ...] = ()  # members that the job no longer wants


def place_partitions(policy: Policy, first: Membership) -> Membership:
    """Return the first membership of a job with its partitions assigned to servers."""
    if not (policy.is_elastic and policy.partitions):
        return first
    hosts = {one.rank: one.host_id for one in _servers(first.members)}
    layout = initial_layout(policy.partitions, policy.replicas, hosts)
    return msgspec.structs.replace(first, partitions=layout.holders, filling=layout.filling)


def urgent_change(
    policy: Policy,
    state: RosterState,
    losses: Mapping[int, m.Loss],
    left: Mapping[int, str],
    candidates: Mapping[int, Member],
) -> NextMembership | None:
    """Return the membership without departed members, with replacements if all vacant workers have
    one; None if nothing is urgent."""
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
    able = {one.rank: one.host_id for one in _servers(stay) if is_wanted(state, one)}
    layout = add_missing_copies(_layout(now).without(gone), policy.replicas, able)
    vacant = tuple(loss.rank for loss in kept)
    after = now.next(stay, layout.holders, layout.filling, vacant)
    why = _reasons(lost.values())
    why += [*left.values(), *(f"{describe(one)} takes its place" for one in joined)]
    ranks = tuple(one.rank for one in joined)
    changed = m.Changed(after, tuple(lost.values()), ranks, "; ".join(why))
    return NextMembership(changed, tuple(kept))


def calm_change(
    policy: Policy,
    state: RosterState,
    candidates: Mapping[int, Member],
    synced: Collection[tuple[int, int]],
    retiring: Collection[int] = (),
) -> NextMembership | None:
    """Return the membership with newcomers, without removed members and with the next moves of
    partitions; None if there is nothing to do."""
    now = _membership(state)
    layout = _layout(now)
    # A number that a worker still has, or in which one takes its last step, has no second worker.
    occupied = {*now.worker_numbers, *retiring, *(loss.number for loss in state.vacant)}
    ready = complete_units(policy, candidates.values())
    joined = [one for one in ready if one.role == "server" or one.number not in occupied]
    joined = complete_units(policy, joined)
    removed = removable_members(
        policy, state, {one.number for one in ready if one.role == "worker"}
    )
    members = [one for one in now.members if one.rank not in removed] + joined
    why = [f"{describe(one)} joined" for one in joined]
    leaving_ranks = state.leaving_ranks
    why += [
        f"{describe(now.member(rank))}"
        f" {'leaves as planned' if rank in leaving_ranks else 'is no longer wanted'}"
        for rank in removed
    ]
    for partition, rank in sorted(synced):
        if rank in layout.filling[partition]:
            layout = layout.synced(partition, rank)
            why.append(f"partition {partition} has another copy")
    before = layout
    if layout.holders:
        hosts = {one.rank: one.host_id for one in _servers(members)}
        # Partitions move once: not before the server is there that is to have them.
        waiting = _await_successors(state, members)
        leaving = {one.rank for one in _servers(members) if not is_wanted(state, one)} - waiting
        replicas = policy.replicas
        if any(one.rank in hosts and not one.waits for one in state.leaving):
            # Servers that cannot wait leave, if need be with fewer copies than there should be.
            replicas = max(1, min(replicas, len(hosts) - len(leaving)))
        layout = next_layout(layout, replicas, hosts, leaving, len(state.servers))
    if layout != before:
        why.append("partitions move")
    if not why:
        return None
    vacant = tuple(loss.rank for loss in state.vacant)
    after = now.next(members, layout.holders, layout.filling, vacant)
    ranks = tuple(one.rank for one in joined)
    changed = m.Changed(after, (), ranks, "; ".join(why))
    return NextMembership(changed, state.vacant, removed)


def _await_successors(state: RosterState, members: Iterable[Member]) -> set[int]:
    """Return the leaving servers that wait, and whose replacement has not joined yet."""
    numbers = {one.number for one in _servers(members)}
    return {
        one.rank
        for one in state.leaving
        if one.waits and one.successor is not None and one.successor not in numbers
    }


def reason_to_end(policy: Policy, state: RosterState, after: NextMembership | None) -> str:
    """Return why the job is over after this change; "" if it is not."""
    membership = _membership(state) if after is None else after.changed.membership
    vacant = state.vacant if after is None else after.vacant
    losses = (*(after.changed.lost if after else ()), *vacant)
    if not any(loss.kind.is_cause for loss in losses):
        return ""  # no loss, or the scripts have failed: the launcher ends the job
    alive = len(set(membership.workers) - {loss.rank for loss in vacant})
    if state.is_finishing and not alive:
        return ""  # no worker needs the servers' tables any more
    gone = "; ".join(_reasons(losses))
    unheld = _layout(membership).lost
    if unheld:
        return (
            f"every copy of partition{'s' if len(unheld) > 1 else ''}"
            f" {', '.join(map(str, unheld))} of the servers' tables is lost ({gone});"
            " start the job again, with more --replicas"
        )
    least = 1 if policy.on_loss == "replace" else policy.min_workers
    if state.is_finishing or alive >= least:
        return ""
    return (
        f"{alive} worker{' is' if alive == 1 else 's are'} left, expected at least {least}"
        f"{'' if policy.on_loss == 'replace' else ' (--min)'}: {gone}{_advice(policy, alive)}"
    )


def _advice(policy: Policy, alive: int) -> str:
    """Return how to start a job again that has lost the state of its training."""
    if alive:
        return ""
    has_one_copy = policy.unit_size > 1 and policy.num_workers == policy.unit_size
    other = " a mesh with dp of at least 2, or with" if has_one_copy else ""
    return (
        "; no worker is left that has the training state: start the job again, with"
        f"{other} --restarts 1 and a checkpoint, from which it resumes by itself"
    )


def _reasons(losses: Iterable[m.Loss]) -> list[str]:
    """Name the members that are lost for a reason of their own, and count their unit peers."""
    losses = list(losses)
    causes = [loss for loss in losses if loss.kind.is_own]
    reasons = [f"{_describe_loss(loss)} lost: {loss.why}" for loss in causes or losses]
    peers = len(losses) - len(causes)
    if causes and peers:
        units = "its unit" if len(causes) == 1 else "their units"
        reasons[-1] += f", and {peers} worker{'s' if peers > 1 else ''} with {units}"
    return reasons


def loss_cost(policy: Policy, state: RosterState, rank: int) -> int:
    """Return how bad the loss of a member would be, for choosing between two."""
    now = _membership(state)
    layout = _layout(now)
    if layout.without({rank}).lost:
        return FATAL_COST
    workers = set(now.workers) - {loss.rank for loss in state.vacant}
    least = 1 if policy.on_loss == "replace" else policy.min_workers
    if rank in workers and len(workers) - policy.unit_size < least:
        return FATAL_COST
    return layout.load(rank) + layout.primaries(rank)


def is_held_open(policy: Policy, state: RosterState, loss: m.Loss) -> bool:
    """Return whether the other workers wait for a replacement of a lost worker."""
    return (
        loss.role == "worker"
        and policy.on_loss == "replace"
        and not state.is_finishing
        and loss.number in state.workers
    )


def is_wanted(state: RosterState, member: Member) -> bool:
    """Return whether the job wants to have a member: its number, and this process."""
    return has_wanted_number(state, member) and member.rank not in state.leaving_ranks


def has_wanted_number(state: RosterState, member: Member) -> bool:
    """Return whether the job wants to have a member's number."""
    return member.number in (state.servers if member.role == "server" else state.workers)


def removable_members(
    policy: Policy, state: RosterState, ready: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the members that can leave now: not wanted, and without a partition. A worker that
    waits for a replacement leaves when that is `ready` (numbers). One unit of workers stays in any
    case: a newcomer receives the training state from it."""
    now = _membership(state)
    layout, vacant = _layout(now), {loss.rank for loss in state.vacant}
    waiting = {one.rank for one in state.leaving if one.waits}
    found = [
        one
        for one in now.members
        if not is_wanted(state, one) and one.rank not in vacant and not layout.load(one.rank)
        if not (one.rank in waiting and one.role == "worker" and one.number not in ready)
    ]
    whole = complete_units(policy, found)
    workers = [one for one in whole if one.role == "worker"]
    if workers and len(workers) == len(set(now.workers) - vacant):
        last = unit_numbers(policy, min(one.number for one in workers))
        whole = [one for one in whole if one.role == "server" or one.number not in last]
    return tuple(one.rank for one in whole)


def _layout(membership: Membership) -> PartitionLayout:
    none: tuple[tuple[int, ...], ...] = ((),) * len(membership.partitions)
    return PartitionLayout(membership.partitions, membership.filling or none)


def _servers(members: Iterable[Member]) -> list[Member]:
    """Return the servers among the members, in order of their numbers."""
    return sorted((one for one in members if one.role == "server"), key=lambda one: one.number)


def describe(member: Member) -> str:
    """Return 'worker 3 (host:pid)'."""
    return f"{member.role} {member.number} ({member.where})"


def _describe_loss(loss: m.Loss) -> str:
    return f"{loss.role} {loss.number} ({loss.where})"


def _membership(state: RosterState) -> Membership:
    assert state.membership is not None, "not all initial members have joined"
    return state.membership


def change_events(before: Membership | None, changed: m.Changed) -> list[MembershipEvent]:
    """Return what happened between a membership and the one that follows it."""
    if before is None:
        return []  # the start of the job is not an event
    now, found = changed.membership, list[MembershipEvent]()
    lost = {loss.rank for loss in changed.lost}
    generation = now.generation
    for loss in changed.lost:
        process = (loss.role, loss.number, loss.rank, loss.where)
        found.append(MemberLost(*process, loss.why, generation))
    for one in before.members:
        if one.rank not in now.ranks and one.rank not in lost:
            found.append(MemberLeft(one.role, one.number, one.rank, one.where, generation))
    found += _partition_events(before, now)
    for rank in changed.joined:
        one = now.member(rank)
        found.append(MemberJoined(one.role, one.number, one.rank, one.where, generation))
    return found


def _partition_events(before: Membership, now: Membership) -> list[MembershipEvent]:
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
        *(BackupCaughtUp(number(r), tuple(ps), generation) for r, ps in filled.items()),
        *(
            PartitionsMoved(number(source), number(target), tuple(ps), generation)
            for (source, target), ps in moved.items()
        ),
    ]
