"""The places of a job: which numbers of a role it wants, which are taken, which are given away.

Functions from one `State` to the next. A number is FREE when no member has it and it is not given
away; the number of a lost worker is free at once, so that a replacement can take it over. The
places of a unit are given away together, with ranks in a row, so that each of its
members knows the ranks of the others; those that nobody has asked for yet stay OPEN.

With a mesh (runtime/mesh.py) the numbers u * size to u * size + size - 1 are one UNIT, and its
members are MATES. A worker that loses a mate cannot go on: it waits in an exchange that never ends.
So a unit is lost as a whole, comes in as a whole, and all counts of workers are multiples of its
size. Without a mesh each worker is a unit of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from paceline.control.member import Member
from paceline.control.membership.decisions import Place, State, Wanted
from paceline.control.membership.policy import Policy, require_whole_units
from paceline.control.transport.messages import LossKind
from paceline.errors import RendezvousError, UsageError


def unit(policy: Policy, number: int) -> Sequence[int]:
    """Return the numbers of a worker's unit."""
    size = policy.unit_size
    first = number - number % size
    return range(first, first + size)


def whole(policy: Policy, members: Iterable[Member]) -> list[Member]:
    """Leave out workers some of whose mates are not among them."""
    members = list(members)
    numbers = {one.number for one in members if one.role == "worker"}
    return [
        one
        for one in members
        if one.role != "worker" or numbers.issuperset(unit(policy, one.number))
    ]


def because_of(name: str, why: str) -> str:
    """Return the words for why a mate of a lost worker is lost too."""
    return f"retired with its unit: {name}: {why}"


def kind_of_mate(kind: LossKind) -> LossKind:
    """Return how the mates of a member are lost that is lost in this way."""
    return LossKind.RELEASED if kind.is_willing else LossKind.RETIRED


def free_unit(policy: Policy, taken: Collection[int]) -> Sequence[int]:
    """Return the first unit none of whose numbers is taken."""
    first = 0
    while any(number in taken for number in unit(policy, first)):
        first += policy.unit_size
    return unit(policy, first)


def at_start(policy: Policy) -> State:
    """The state before anybody is there; the first ranks belong to the first crowd."""
    return State(
        next_rank=policy.num_workers + policy.num_servers,
        workers=tuple(range(policy.num_workers)),
        servers=tuple(range(policy.num_servers)),
    )


def place_of(state: State, rank: int) -> Place | None:
    """Return the place that was given away with this rank."""
    return next((place for place in state.reserved if place.rank == rank), None)


def reserve(
    policy: Policy, state: State, role: str, number: int | None = None, request: int = 0
) -> tuple[Place, State]:
    """Give away a rank with a number: the given, a wanted, or the smallest free one."""
    if role not in ("worker", "server"):
        raise UsageError(f"role {role!r:.40}: expected worker or server")
    if state.membership is None:
        raise RendezvousError("the job is still forming: its first members are not all there")
    if state.is_finishing or state.over:
        raise RendezvousError(f"the job is over: {state.over or 'its workers are finishing'}")
    kept = {place.number: place for place in state.reserved if place.is_open and place.role == role}
    taken = _taken(state, role) - set(kept)
    wished = _wished(state, role)
    if number is None:
        wanted = [n for n in wished if n not in taken]
        number = wanted[0] if wanted else _first_free(policy, role, {*taken, *wished})
    if number in kept:
        return _claim(state, kept[number], request)
    numbers = unit(policy, number) if role == "worker" else (number,)
    for mate in (number, *numbers):
        if mate in taken:
            raise RendezvousError(f"{role} {mate} is there already, or on its way")
    if number not in wished:
        most = policy.max_workers if role == "worker" else policy.max_servers
        if len(wished) + len(numbers) > most:
            raise RendezvousError(
                f"the job has {len(wished)} {role}s, which is the most that it may have"
                f" (--max{'-servers' if role == 'server' else ''} {most})"
            )
        state = _wish(state, role, (*wished, *numbers))
    first = state.next_rank
    places = tuple(Place(first + k, role, n, is_open=True) for k, n in enumerate(numbers))
    state = msgspec.structs.replace(
        state, next_rank=first + len(places), reserved=(*state.reserved, *places)
    )
    return _claim(state, places[number - numbers[0]], request)


def _claim(state: State, kept: Place, request: int) -> tuple[Place, State]:
    """Give an open place to whoever asks for it."""
    place = msgspec.structs.replace(kept, request=request, is_open=False)
    others = tuple(place if one == kept else one for one in state.reserved)
    return place, msgspec.structs.replace(state, reserved=others)


def unit_places(policy: Policy, state: State, rank: int) -> tuple[Place, ...]:
    """Return the reserved places of the unit for which a rank was given away; it comes first."""
    place = place_of(state, rank)
    if place is None:
        return ()
    numbers = unit(policy, place.number) if place.role == "worker" else (place.number,)
    mates = (p for p in state.reserved if p.role == place.role and p.number in numbers)
    return (place, *(mate for mate in mates if mate != place))


def open_places(state: State) -> list[Wanted]:
    """Return the places that lack a process."""
    if state.membership is None or state.is_finishing or state.over:
        return []
    return [
        Wanted(role, number)
        for role in ("server", "worker")
        for number in _wished(state, role)
        if number not in _taken(state, role) or number in _open(state, role)
    ]


def scaled(policy: Policy, state: State, workers: int) -> State:
    """Want so many workers: the smallest numbers stay."""
    if not policy.min_workers <= workers <= policy.max_workers:
        raise UsageError(
            f"-n {workers}: this job may have {policy.min_workers} to {policy.max_workers}"
            " (--min, --max)"
        )
    require_whole_units(policy.mesh, "-n", workers)
    kept = state.workers[:workers]
    while len(kept) < workers:
        kept = _sorted((*kept, _smallest_free(kept)))
    return msgspec.structs.replace(state, workers=kept)


def more_servers(policy: Policy, state: State, count: int) -> State:
    """Want more servers."""
    if not state.servers:
        raise UsageError("this job has no servers; start it with -s 1 to have some")
    if count < 1 or len(state.servers) + count > policy.max_servers:
        raise UsageError(
            f"servers add {count}: this job has {len(state.servers)} and may have up to"
            f" {policy.max_servers} (--max-servers)"
        )
    taken = {*_taken(state, "server"), *state.servers}
    for _ in range(count):
        number = _smallest_free(taken)
        taken.add(number)
        state = _wish(state, "server", (*state.servers, number))
    return state


def fewer_servers(policy: Policy, state: State, numbers: Collection[int]) -> State:
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


def _wished(state: State, role: str) -> tuple[int, ...]:
    return state.workers if role == "worker" else state.servers


def _wish(state: State, role: str, numbers: tuple[int, ...]) -> State:
    field = "workers" if role == "worker" else "servers"
    return msgspec.structs.replace(state, **{field: _sorted(numbers)})


def _sorted(numbers: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


def _open(state: State, role: str) -> set[int]:
    return {place.number for place in state.reserved if place.role == role and place.is_open}


def _first_free(policy: Policy, role: str, taken: Collection[int]) -> int:
    return free_unit(policy, taken)[0] if role == "worker" else _smallest_free(taken)


def _smallest_free(taken: Collection[int]) -> int:
    number = 0
    while number in taken:
        number += 1
    return number


def _taken(state: State, role: str) -> set[int]:
    """The numbers that have a living member, or a newcomer on its way."""
    lost = {loss.rank for loss in state.vacant}
    members: tuple[Member, ...] = state.membership.members if state.membership else ()
    there = {one.number for one in members if one.role == role and one.rank not in lost}
    return there | {place.number for place in state.reserved if place.role == role}
