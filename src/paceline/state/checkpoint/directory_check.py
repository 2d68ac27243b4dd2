"""Checks of a checkpoint directory before the first save, and the choice of the one to load.

All workers must see the same writable directory. The first worker chooses a checkpoint, and all
workers load the same one.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object, broadcast_object
from paceline.errors import CheckpointError, PacelineError, named
from paceline.runtime.job import Job
from paceline.state.files import load as reading
from paceline.state.files import save as writing


def check_directory(root: Path, job: Job, group: Group) -> None:
    """Check that all workers share a writable directory. Collective.

    If one worker finds a problem, all workers raise it.
    """
    mark = root / f".directory-check-{job.rendezvous.job_id[:24]}"
    raise_together(group, _try_to_mark(mark) if group.rank == 0 else None)
    problem: PacelineError | None = None
    if not mark.exists():
        problem = CheckpointError(
            f"rank {job.env.rank}: {root} on {os.uname().nodename} is not the directory that rank 0"
            " sees under this name; use a directory on a file system that all hosts share",
            path=root,
        )
    elif not os.access(root, os.W_OK | os.X_OK):
        problem = _no_permission(root)
    try:
        raise_together(group, problem)
    finally:
        if group.rank == 0:
            mark.unlink(missing_ok=True)


def raise_together(group: Group, problem: PacelineError | None, answer: str = "") -> str:
    """Raise the first problem of any worker on all workers; else return rank 0's `answer`."""
    mine = None if problem is None else [type(problem).__name__, str(problem)]
    for found in all_gather_object(group, mine):
        if found is not None:
            raise problem or named(*found)
    first: str = broadcast_object(group, answer)
    return first


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
        " directory, or change its permissions",
        path=root,
    )


RESUME_MODES = ("auto", "always", "never", "weights")


def choose_checkpoint(root: Path, resume: str, group: Group) -> reading.NewestCheckpoint:
    """Load the newest complete checkpoint, if there is one. Collective.

    If one worker finds a problem, all workers raise it. "always" and "weights" also raise if there
    is no checkpoint.
    """
    if resume == "never":
        return reading.NewestCheckpoint(None, ())
    problem, newest = None, reading.NewestCheckpoint(None, ())
    try:
        if group.rank == 0:
            newest = _newest(root, resume)
    except PacelineError as error:
        problem = error
    name = newest.loaded.path.name if newest.loaded is not None else ""
    name = raise_together(group, problem, name)
    if not name or group.rank == 0:
        loaded = newest.loaded
    else:
        try:
            loaded = reading.load(root / name)
        except PacelineError as error:
            loaded, problem = None, error
    if name:
        raise_together(group, problem)
    return reading.NewestCheckpoint(loaded, newest.notices)


def _newest(root: Path, resume: str) -> reading.NewestCheckpoint:
    writing.sweep(root)
    newest = reading.newest(root)
    if newest.loaded is None and resume in ("always", "weights"):
        raise CheckpointError(
            f"Checkpoint(resume={resume!r}): there is no checkpoint in {root}; name another"
            " directory, or use resume='auto'",
            path=root,
        )
    return newest
