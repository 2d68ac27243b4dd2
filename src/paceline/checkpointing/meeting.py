"""Before anything is saved: do all workers see the same directory, and can they write to it?"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.collectives.agreement import take_from, tell_all
from paceline.collectives.group import Group
from paceline.errors import CheckpointError, PacelineError, named
from paceline.job import Job


def meet_in(root: Path, job: Job, group: Group) -> None:
    """See that all workers share a directory that can be written to. Collective.

    All raise what one of them finds wrong.
    """
    mark = root / f".meeting-{job.rendezvous.job_id[:24]}"
    tell_problem(group, _try_to_mark(mark) if group.rank == 0 else None)
    problem: PacelineError | None = None
    if not mark.exists():
        problem = CheckpointError(
            f"rank {job.env.rank}: {root} is not the directory that rank 0 has under this name"
            f" (on {os.uname().nodename}); checkpoints of several hosts need a file system that all"
            " of them share",
            path=root,
        )
    elif not os.access(root, os.W_OK | os.X_OK):
        problem = _no_permission(root)
    try:
        tell_problem(group, problem)
    finally:
        if group.rank == 0:
            mark.unlink(missing_ok=True)


def tell_problem(group: Group, problem: PacelineError | None, word: str = "") -> str:
    """Raise on all workers what any of them has found; else return the first one's word."""
    told = None if problem is None else [type(problem).__name__, str(problem)]
    for found in tell_all(group, told):
        if found is not None:
            raise problem or named(*found)
    answer: str = take_from(group, word)
    return answer


def _try_to_mark(mark: Path) -> PacelineError | None:
    root = mark.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except PermissionError:
        return _no_permission(root)
    except OSError as error:
        return CheckpointError(
            f"checkpoints cannot be saved in {root}: {error.strerror or error}; name another"
            " directory",
            path=root,
        )
    return None


def _no_permission(root: Path) -> CheckpointError:
    return CheckpointError(
        f"checkpoints cannot be saved in {root}: no permission for uid {os.getuid()}; name another"
        " directory, or change its rights",
        path=root,
    )
