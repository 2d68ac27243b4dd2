"""The state of the roster, and the functions that give and take numbers of a role.

`RosterState` is all that must survive the coordinator. It is small, so each journal entry holds all
of it: replaying a journal means taking its last entry.

A number is FREE if no member has it and it is not reserved. The number of a lost worker is free at
once, so that a replacement can take it, and so is that of a worker whose host goes away: its
replacement starts while it still works (PLANNED LEAVE).

With a mesh (runtime/mesh.py) the numbers u * size to u * size + size - 1 are one UNIT. A worker
cannot continue without its unit peers: it would wait in an exchange that never ends. So a unit is
lost as a whole and joins as a whole, and every count of workers is a multiple of its size. The
numbers of a unit are reserved together, with consecutive ranks, so that each of its members knows
the ranks of its peers. Reservations that no process has claimed yet are OPEN. Without a mesh each
worker is a unit of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar, TypeAlias

import msgspec

from paceline.control import messages as m
from paceline.control.member import Member, Membership
from paceline.control.membership.policy import Policy, require_whole_units
from paceline.errors import RendezvousError, UsageError

Decision: TypeAlias = m.Changed | m.Over | m.Presence | m.Wanted | m.Unwanted | m.Remark


class Reservation(msgspec.Struct, frozen=True):
    """A rank and a number of a role, for a process that is not a member yet."""

    rank: int
    role: str
    number: int
    request: int = 0  # the id of the request that claimed it
    is_open: bool = False  # in a unit: reserved with a peer's number, and not claimed yet


class PlannedLeave(msgspec.Struct, frozen=True):
    """A member that leaves while its number stays wanted: its host goes away."""

    rank: int
    waits: bool = False  # until a replacement is ready
    successor: int | None = None  # of a server: the number that is wanted instead


class PaceRequest(msgspec.Struct, frozen=True):
    """An operator's request for another pace (control/coordinator/pace_change.py)."""

    OPEN: ClassVar[int] = -1
    REFUSED: ClassVar[int] = -2

    number: int  # counts up
    pace: str
    request: int  # the id of the operator's message
    step: int = OPEN  # the pace changes after this step

    @property
    def is_settled(self) -> bool:
        return self.step != self.OPEN


class RosterState(msgspec.Struct, frozen=True):
    """The membership, and everything that was promised about it."""

    membership: Membership | None = None
    next_rank: int = 0
    workers: tuple[int, ...] = ()  # the numbers that the job wants to have
    servers: tuple[int, ...] = ()
    reserved: tuple[Reservation, ...] = ()
    vacant: tuple[m.Loss, ...] = ()  # lost workers that wait for a replacement
    is_finishing: bool = False  # a worker has finished: no member is replaced any more
    over: str = ""
    handled: tuple[int, ...] = ()  # ids of the last requests: none is handled twice
    pace_request: PaceRequest | None = msgspec.field(default=None, name="wish")  # the last one
    leaving: tuple[PlannedLeave, ...] = ()

    @property
    def leaving_ranks(self) -> frozenset[int]:
        return frozenset(one.rank for one in self.leaving)


def initial_state(policy: Policy) -> RosterState:
    """Return the state before any process has joined; initial members have the first ranks."""
    return RosterState(
        next_rank=policy.num_workers + policy.num_servers,
        workers=tuple(range(policy.num_workers)),
        servers=tuple(range(policy.num_servers)),
    )


def unit_numbers(policy: Policy, number: int) -> Sequence[int]:
    """Return the numbers of a worker's unit."""
    size = policy.unit_size
    first = number - number % size
    return range(first, first + size)


def complete_units(policy: Policy, members: Iterable[Member]) -> list[Member]:
    """Return the members without the workers whose unit is incomplete among them."""
    members = list(members)
    numbers = {one.number for one in members if one.role == "worker"}
    return [
        one
        for one in members
        if one.role != "worker" or numbers.issuperset(unit_numbers(policy, one.number))
    ]


def unit_loss_reason(name: str, why: str) -> str:
    """Return why the unit peers of a lost worker are lost too."""
    return f"retired with its unit: {name}: {why}"


def unit_loss_kind(kind: m.LossKind) -> m.LossKind:
    """Return the kind of loss of the unit peers of a member that is lost in this way."""
    return m.LossKind.RELEASED if kind.is_willing else m.LossKind.RETIRED


def reservation_of(state: RosterState, rank: int) -> Reservation | None:
    """Return the reservation with this rank."""
    return next((one for one in state.reserved if one.rank == rank), None)


def unit_reservations(policy: Policy, state: RosterState, rank: int) -> tuple[Reservation, ...]:
    """Return the reservation with this rank, followed by those of its unit peers."""
    first = reservation_of(state, rank)
    if first is None:
        return ()
    is_worker = first.role == "worker"
    numbers = unit_numbers(policy, first.number) if is_worker else (first.number,)
    unit = (r for r in state.reserved if r.role == first.role and r.number in numbers)
    return (first, *(one for one in unit if one != first))


def reserve(
    policy: Policy, state: RosterState, role: str, number: int | None = None, request: int = 0
) -> tuple[Reservation, RosterState]:
    """Reserve a rank with a number: the given one, a wanted one, or the smallest free one."""
    if role not in ("worker", "server"):
        raise UsageError(f"role {role!r:.40}: expected worker or server")
    if state.membership is None:
        raise RendezvousError("the job is still forming: not all initial members have joined")
    if state.is_finishing or state.over:
        raise RendezvousError(f"the job is over: {state.over or 'its workers are finishing'}")
    kept = {one.number: one for one in state.reserved if one.is_open and one.role == role}
    taken = taken_numbers(state, role) - set(kept)
    wanted = _wanted(state, role)
    if number is None:
        lacking = [n for n in wanted if n not in taken]
        number = lacking[0] if lacking else _first_free(policy, role, {*taken, *wanted})
    if number in kept:
        return _claim(state, kept[number], request)
    numbers = unit_numbers(policy, number) if role == "worker" else (number,)
    for one in (number, *numbers):
        if one in taken:
            raise RendezvousError(f"{role} {one} is a member already, or is joining")
    if number not in wanted:
        most = policy.max_workers if role == "worker" else policy.max_servers
        if len(wanted) + len(numbers) > most:
            raise RendezvousError(
                f"the job has {len(wanted)} {role}s, the most that it may have"
                f" (--max{'-servers' if role == 'server' else ''} {most})"
            )
        state = want_numbers(state, role, (*wanted, *numbers))
    first = state.next_rank
    unit = tuple(Reservation(first + k, role, n, is_open=True) for k, n in enumerate(numbers))
    state = msgspec.structs.replace(
        state, next_rank=first + len(unit), reserved=(*state.reserved, *unit)
    )
    return _claim(state, unit[number - numbers[0]], request)


def _claim(state: RosterState, kept: Reservation, request: int) -> tuple[Reservation, RosterState]:
    claimed = msgspec.structs.replace(kept, request=request, is_open=False)
    reserved = tuple(claimed if one == kept else one for one in state.reserved)
    return claimed, msgspec.structs.replace(state, reserved=reserved)


def wanted_processes(state: RosterState) -> list[m.Wanted]:
    """Return the numbers that the job wants and for which no process exists."""
    if state.membership is None or state.is_finishing or state.over:
        return []
    return [
        m.Wanted(role, number)
        for role in ("server", "worker")
        for number in _wanted(state, role)
        if number not in taken_numbers(state, role) or number in _open(state, role)
    ]


def scale_workers(policy: Policy, state: RosterState, workers: int) -> RosterState:
    """Want this many workers: the smallest numbers stay."""
    if not policy.min_workers <= workers <= policy.max_workers:
        raise UsageError(
            f"-n {workers}: this job may have {policy.min_workers} to {policy.max_workers} workers"
            " (--min, --max)"
        )
    require_whole_units(policy.mesh, "-n", workers)
    kept = _sorted(_staying_first(state)[:workers])
    while len(kept) < workers:
        kept = _sorted((*kept, smallest_free(kept)))
    return msgspec.structs.replace(state, workers=kept)


def _staying_first(state: RosterState) -> list[int]:
    """Return the numbers of wanted workers in order, those whose worker leaves anyway last."""
    leaving, members = state.leaving_ranks, state.membership.members if state.membership else ()
    gone = {one.number for one in members if one.role == "worker" and one.rank in leaving}
    return sorted(state.workers, key=lambda number: (number in gone, number))


def add_servers(policy: Policy, state: RosterState, count: int) -> RosterState:
    """Want `count` more servers."""
    if not state.servers:
        raise UsageError("this job has no servers; start it with -s 1 to have some")
    if count < 1 or len(state.servers) + count > policy.max_servers:
        raise UsageError(
            f"servers add {count}: this job has {len(state.servers)} and may have up to"
            f" {policy.max_servers} (--max-servers)"
        )
    taken = {*taken_numbers(state, "server"), *state.servers}
    for _ in range(count):
        number = smallest_free(taken)
        taken.add(number)
        state = want_numbers(state, "server", (*state.servers, number))
    return state


def remove_servers(policy: Policy, state: RosterState, numbers: Collection[int]) -> RosterState:
    """Want these servers no longer."""
    unknown = sorted(set(numbers) - set(state.servers))
    if unknown:
        lacks, has = (", ".join(map(str, some)) for some in (unknown, state.servers))
        raise UsageError(f"servers remove: there is no server {lacks}; this job has {has}")
    kept = tuple(number for number in state.servers if number not in numbers)
    if len(kept) < policy.replicas:
        raise UsageError(
            f"removing servers {sorted(numbers)} would leave {len(kept)}: each partition needs"
            f" {policy.replicas} (--replicas); add servers first"
        )
    return msgspec.structs.replace(state, servers=kept)


def _wanted(state: RosterState, role: str) -> tuple[int, ...]:
    return state.workers if role == "worker" else state.servers


def want_numbers(state: RosterState, role: str, numbers: tuple[int, ...]) -> RosterState:
    field = "workers" if role == "worker" else "servers"
    return msgspec.structs.replace(state, **{field: _sorted(numbers)})


def _sorted(numbers: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


def _open(state: RosterState, role: str) -> set[int]:
    return {one.number for one in state.reserved if one.role == role and one.is_open}


def _first_free(policy: Policy, role: str, taken: Collection[int]) -> int:
    """Return the smallest free number of a server, or the first number of a free unit."""
    if role != "worker":
        return smallest_free(taken)
    first = 0
    while any(number in taken for number in unit_numbers(policy, first)):
        first += policy.unit_size
    return first


def smallest_free(taken: Collection[int]) -> int:
    number = 0
    while number in taken:
        number += 1
    return number


def taken_numbers(state: RosterState, role: str) -> set[int]:
    """Return the numbers that a living member has, or that are reserved.

    A worker that leaves is replaced under its number; a server keeps its number until it is gone.
    """
    free = {loss.rank for loss in state.vacant}
    free |= state.leaving_ranks if role == "worker" else set()
    members: tuple[Member, ...] = state.membership.members if state.membership else ()
    present = {one.number for one in members if one.role == role and one.rank not in free}
    return present | {one.number for one in state.reserved if one.role == role}
