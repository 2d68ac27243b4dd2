"""Units: the workers that hold one copy of the model between them come and go together.

With a mesh (mesh.py) the numbers u * size to u * size + size - 1 are one UNIT, and its members are
MATES. Whoever loses a mate cannot go on: it waits in an exchange that never ends. So a unit is lost
as a whole, comes in as a whole, and all counts of workers are multiples of its size. Without a mesh
each worker is a unit of its own, and nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from paceline.cluster.member import Member
from paceline.cluster.messages import LossKind
from paceline.cluster.policy import Policy


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
