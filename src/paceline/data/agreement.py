"""Do all ranks mean the same loader? Asked before the first batch, answered alike on every rank.

What one rank finds wrong is raised by all of them, so that nobody waits for a rank that has given
up. The group is the data's own: its collectives never come between those of the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object, raise_first_problem
from paceline.errors import DataError, UsageError, named
from paceline.runtime.job import Job

_LENGTHS = ("the length of the dataset", "the length of the sampler", "the number of batches")


@dataclass(frozen=True)
class _Owned:
    job: weakref.ref[Job]
    group: Group


_owned: list[_Owned] = []


def group_of(job: Job) -> Group:
    """Return the group for the data of this job; made when it is first needed, by all ranks."""
    for owned in _owned:
        if owned.job() is job:
            return owned.group
    _owned.append(_Owned(weakref.ref(job, _let_go), job.worker_group("data")))
    return _owned[-1].group


def _let_go(job: weakref.ref[Job]) -> None:
    """Do not keep the engine of a job that is over."""
    _owned[:] = [owned for owned in _owned if owned.job is not job]


def agree(
    job: Job, problem: str | None, facts: Mapping[str, Any], aside: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Check that no rank has a problem and that all have the same facts; return what each told
    aside. Collective; all ranks return, or all raise the same UsageError."""
    group = group_of(job.whole)  # on a mesh those too that get the same batches
    mine = [problem, dict(facts), dict(aside)]
    with job.reporter.waiting:
        ranks, told = job.elastic.point(lambda: [list(group.ranks), all_gather_object(group, mine)])
    try:
        raise_first_problem(ranks, "pl.shard", [entry[0] for entry in told])
    except UsageError as error:
        kinds = [entry[2].get("problem") for entry in told if entry[0] is not None]
        raise named(kinds[0] or "UsageError", str(error)) from None
    for rank, (_, found, _) in zip(ranks, told, strict=True):
        require_same(found, f"rank {rank}", told[0][1], f"rank {ranks[0]}")
    return [entry[2] for entry in told]


def require_same(
    found: Mapping[str, Any], here: str, expected: Mapping[str, Any], there: str
) -> None:
    """Raise UsageError for the first fact that differs."""
    for name in expected:
        if found.get(name) != expected[name]:
            kind = DataError if name in _LENGTHS else UsageError
            raise kind(
                f"pl.shard: {name} is {found.get(name)!r} on {here}, expected"
                f" {expected[name]!r} as on {there}; pass the same loader and"
                " arguments on every rank, or presharded=True if each rank has data of its own"
            )
