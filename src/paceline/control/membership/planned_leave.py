"""Planned leaves: members leave at a boundary because their host goes away. Pure functions.

A planned leave is what `paceline scale` does to workers and `paceline servers remove` to servers,
but the job keeps its size: the number of a worker stays wanted, and so does the count of servers. A
worker leaves after a step that all workers have agreed on, a server when its partitions have moved;
both are calm changes (changes.py), so no step is repeated. A member that is lost before counts as
any other loss.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from paceline.control import messages as m
from paceline.control.member import Member
from paceline.control.membership.policy import Policy
from paceline.control.membership.state import (
    PlannedLeave,
    RosterState,
    smallest_free,
    taken_numbers,
    unit_numbers,
    want_numbers,
)


def plan(policy: Policy, state: RosterState, ranks: Collection[int], waits: bool) -> RosterState:
    """Let members leave whose host goes away; a worker leaves with its unit.

    A replacement of a worker has its number. That of a server has another one, because both are
    members until the partitions have moved. `waits`: not before replacements are ready.
    """
    members: tuple[Member, ...] = state.membership.members if state.membership else ()
    units = {
        number
        for one in members
        if one.rank in ranks and one.role == "worker"
        for number in unit_numbers(policy, one.number)
    }
    known = {one.rank: one for one in state.leaving}
    for one in members:
        is_in_unit = one.role == "worker" and one.number in units
        if not (is_in_unit or (one.rank in ranks and one.role == "server")):
            continue
        leave = known.get(one.rank) or PlannedLeave(one.rank)
        if one.role == "server" and leave.successor is None and one.number in state.servers:
            successor = smallest_free({*taken_numbers(state, "server"), *state.servers})
            kept = (number for number in state.servers if number != one.number)
            state = want_numbers(state, "server", (*kept, successor))
            leave = msgspec.structs.replace(leave, successor=successor)
        known[one.rank] = msgspec.structs.replace(leave, waits=waits)
    return msgspec.structs.replace(state, leaving=tuple(known.values()))


def withdraw(policy: Policy, state: RosterState, ranks: Collection[int]) -> RosterState:
    """Let members stay that were to leave; a worker stays with its unit."""
    members = {one.rank: one for one in (state.membership.members if state.membership else ())}
    units = {
        number
        for rank in ranks
        if rank in members and members[rank].role == "worker"
        for number in unit_numbers(policy, members[rank].number)
    }
    kept = []
    for leave in state.leaving:
        member = members.get(leave.rank)
        is_in_unit = member is not None and member.role == "worker" and member.number in units
        if member is None or not (is_in_unit or leave.rank in ranks):
            kept.append(leave)
        elif leave.successor in state.servers:
            others = (number for number in state.servers if number != leave.successor)
            state = want_numbers(state, "server", (*others, member.number))
    return msgspec.structs.replace(state, leaving=tuple(kept))


def presences(before: RosterState, after: RosterState, why: str) -> list[m.Presence]:
    """Return the notices to all members about those that leave or stay from now on."""
    new = sorted(after.leaving_ranks - before.leaving_ranks)
    back = sorted(before.leaving_ranks - after.leaving_ranks)
    return [
        *(m.Presence(rank, "leaving", why) for rank in new),
        *(m.Presence(rank, "back", why) for rank in back),
    ]
