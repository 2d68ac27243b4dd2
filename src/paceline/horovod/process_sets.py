"""Process sets: some ranks of the job with operations of their own.

Every rank adds the same sets in the same order, also the ranks that are not in them. Set 0 holds
all ranks.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence

from paceline.comm.group import Group
from paceline.comm.named_group import NamedGroup
from paceline.comm.object_collectives import all_gather_object
from paceline.errors import PacelineError, UsageError
from paceline.horovod import session


class ProcessSet:
    """Some ranks; pass it as `process_set` once it has been added with add_process_set or init."""

    def __init__(self, ranks_or_comm: Iterable[int] | None = None) -> None:
        self._wanted = None if ranks_or_comm is None else _checked(ranks_or_comm)
        self.process_set_id: int | None = None
        self._group: NamedGroup | None = None
        self._incarnation = -1
        self._numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)

    @property
    def ranks(self) -> list[int] | None:
        """The ranks of the set, sorted; None before it was added if none were given."""
        if self._wanted is None and self.process_set_id == 0:
            return list(range(session.size()))
        return None if self._wanted is None else list(self._wanted)

    def size(self) -> int | None:
        """Return the number of ranks; None if the set was not added."""
        return len(self.ranks or ()) if self._is_known() else None

    def rank(self) -> int | None:
        """Return this process's rank in the set; None if it is not in it or it was not added."""
        ranks = self.ranks if self._is_known() else None
        me = session.rank()
        return ranks.index(me) if ranks is not None and me in ranks else None

    def included(self) -> bool | None:
        """Return whether this process is in the set; None if the set was not added."""
        return self.rank() is not None if self._is_known() else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and (
            (self.process_set_id, self._wanted) == (other.process_set_id, other._wanted)
        )

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def _is_known(self) -> bool:
        if self.process_set_id == 0:
            return True
        return self.process_set_id is not None and self._incarnation == session.incarnation()

    # -- for operations -----------------------------------------------------------------------

    @property
    def named(self) -> NamedGroup:
        """The group of this set's operations; raise UsageError if this process cannot use it."""
        if self._group is not None and self._incarnation == session.incarnation():
            return self._group
        session.current()  # raises if there is none
        if self.process_set_id is None or (self.process_set_id and not self._is_known()):
            raise UsageError(
                f"the process set of ranks {self.ranks} has not been added: call"
                " hvd.add_process_set(...) on every rank, or pass it to hvd.init(process_sets=...)"
            )
        if self.process_set_id and not self.included():
            raise UsageError(
                f"rank {session.rank()} is not in the process set of ranks {self.ranks}; call its"
                " operations on its members only"
            )
        raise UsageError("this process set was removed; add it again")

    def next_name(self, kind: str) -> str:
        """Return the name of an operation that was given none: ranks start them in one order."""
        return f"{kind}.noname.{next(self._numbers[kind])}"

    def restart_names(self) -> None:
        """Count unnamed operations from 0 again; on all ranks at the same time."""
        self._numbers.clear()

    def member_of(self, root_rank: int, kind: str) -> int:
        """Return the number in the set of a rank of the job."""
        ranks = self.ranks or []
        if root_rank not in ranks:
            raise UsageError(f"{kind}: root rank {root_rank} is not one of the ranks {ranks}")
        return ranks.index(root_rank)

    def bind(self, number: int, group: NamedGroup | None) -> None:
        """Note that the set exists, with this process's part of it."""
        self.process_set_id, self._group = number, group
        self._incarnation = session.incarnation()
        self._numbers.clear()

    def unbind(self) -> None:
        """Release the set's group."""
        if self._group is not None:
            self._group.close()
        self._group, self.process_set_id = None, None


global_process_set = ProcessSet()
_sets: dict[int, ProcessSet] = {}


def _checked(ranks: Iterable[int]) -> tuple[int, ...]:
    try:
        found = [operator.index(rank) for rank in ranks]
    except (TypeError, ValueError):
        raise UsageError(
            f"ProcessSet({ranks!r}): pass the ranks as a list; MPI communicators are not supported"
        ) from None
    repeated = sorted({rank for rank in found if found.count(rank) > 1})
    if repeated:
        raise UsageError(f"ProcessSet({found}): rank {repeated[0]} is named twice")
    return tuple(sorted(found))


def open_global_set(process_sets: Sequence[ProcessSet] | str | None) -> None:
    """Form the set of all ranks, and the ones that were given to init()."""
    job = session.current()
    _sets.clear()
    group = job.worker_group(f"horovod {session.incarnation()}")
    global_process_set.bind(0, NamedGroup(group))
    _sets[0] = global_process_set
    for one in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(one)


def close_sets() -> None:
    """Release all sets; the job ends."""
    for one in _sets.values():
        one._group = None
        if one is not global_process_set:
            one.process_set_id = None
    _sets.clear()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Form a process set. Collective: every rank adds the same sets in the same order."""
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    problem = _find_problem(wanted)
    job = session.current()
    asked = all_gather_object(job.world, [list(wanted.ranks or ()), problem])
    for rank, (ranks, theirs) in enumerate(asked):
        if theirs:
            raise UsageError(f"add_process_set (rank {rank}): {theirs}")
        if ranks != asked[0][0]:
            raise UsageError(
                f"add_process_set: rank 0 adds the ranks {asked[0][0]}, rank {rank} adds {ranks};"
                " every rank adds the same process sets in the same order"
            )
    number = max(_sets) + 1
    group: NamedGroup | None = None
    if session.rank() in asked[0][0]:
        members = [job.world.ranks[rank] for rank in asked[0][0]]
        name = f"horovod set {session.incarnation()}.{number}"
        group = NamedGroup(Group(job.fabric, members, name=name))
    wanted.bind(number, group)
    _sets[number] = wanted
    return wanted


def _find_problem(wanted: ProcessSet) -> str | None:
    ranks = wanted.ranks
    if not ranks:
        return "the process set has no ranks"
    missing = [rank for rank in ranks if not 0 <= rank < session.size()]
    if missing:
        return f"{missing} are not ranks of this job (0 to {session.size() - 1})"
    if wanted.process_set_id is not None and _sets.get(wanted.process_set_id) is wanted:
        return f"{wanted} has been added already"
    same = [one for one in _sets.values() if one.ranks == ranks]
    return f"the ranks {ranks} are those of {same[0]} already" if same else None


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return whether it could be removed. Collective among all ranks."""
    session.current()
    number = process_set.process_set_id
    if number is None or number == 0 or _sets.get(number) is not process_set:
        return False
    try:
        answers = all_gather_object(session.current().world, number)
    except PacelineError as error:
        raise UsageError(f"remove_process_set: {error}") from error
    if len(set(answers)) > 1:
        raise UsageError(f"remove_process_set: the ranks name different sets: {answers}")
    del _sets[number]
    process_set.unbind()
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of every process set, by its id."""
    session.current()
    return {number: one.ranks or [] for number, one in _sets.items()}


def get_process_set_by_id(number: int) -> ProcessSet:
    """Return a process set by its id."""
    if number not in _sets:
        raise UsageError(f"there is no process set {number}; the sets are {sorted(_sets)}")
    return _sets[number]
