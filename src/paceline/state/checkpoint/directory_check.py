"""Before anything is saved: do all workers see the same directory, can they write to it, and which
checkpoint in it do they go on from? The first worker chooses, and all load the same one.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object, broadcast_object
from paceline.errors import CheckpointError, PacelineError, named
from paceline.runtime.job import Job
from paceline.state.files import reading, writing


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
    for found in all_gather_object(group, told):
        if found is not None:
            raise problem or named(*found)
    answer: str = broadcast_object(group, word)
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


RESUME = ("auto", "always", "never", "weights")


def choose(root: Path, resume: str, group: Group) -> reading.Newest:
    """Load the newest checkpoint that is whole, if there is one. Collective.

    All raise what one of them finds wrong; "always" and "weights" also, if there is none.
    """
    if resume == "never":
        return reading.Newest(None, ())
    problem, newest = None, reading.Newest(None, ())
    try:
        if group.rank == 0:
            newest = _newest(root, resume)
    except PacelineError as error:
        problem = error
    name = newest.loaded.path.name if newest.loaded is not None else ""
    name = tell_problem(group, problem, name)
    if not name or group.rank == 0:
        loaded = newest.loaded
    else:
        try:
            loaded = reading.load(root / name)
        except PacelineError as error:
            loaded, problem = None, error
    if name:
        tell_problem(group, problem)
    return reading.Newest(loaded, newest.notices)


def _newest(root: Path, resume: str) -> reading.Newest:
    writing.sweep(root)
    newest = reading.newest(root)
    if newest.loaded is None and resume in ("always", "weights"):
        raise CheckpointError(
            f"Checkpoint(resume={resume!r}): there is no checkpoint in {root}", path=root
        )
    return newest
