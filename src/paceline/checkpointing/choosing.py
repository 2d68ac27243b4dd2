"""Which checkpoint a job goes on from: the first worker chooses, and all load the same one."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint import reading, retention
from paceline.checkpointing.meeting import tell_problem
from paceline.collectives.group import Group
from paceline.errors import CheckpointError, PacelineError

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
    retention.sweep(root)
    newest = reading.newest(root)
    if newest.loaded is None and resume in ("always", "weights"):
        raise CheckpointError(
            f"Checkpoint(resume={resume!r}): there is no checkpoint in {root}", path=root
        )
    return newest
