"""Whether a job that has ended may be started again from its beginning. Pure rules."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.launcher.outcome import Outcome, RankResult

_SET_UP_S = 300.0  # a script that has reported no step for so long is not setting up any more


def was_lost_at_start(outcome: Outcome, losses: Sequence[RankResult], has_progress: bool) -> bool:
    """Return whether processes were lost before the first step, and nothing else was wrong.

    Nothing has been achieved then that a new start would lose. While they set up, workers are
    not ready to go on without each other: they have nothing yet that they could hand over.
    """
    if outcome.interrupted_by is not None or has_progress:
        return False
    ended = [*losses, *(one for one in outcome.results if not one.status.is_success)]
    is_lost = any(one.status.signal is not None and not one.was_stopped for one in ended)
    is_all = all(
        one.status.signal is not None or one.was_stopped or one.is_consequence for one in ended
    )
    return is_lost and is_all and outcome.wall_s < _SET_UP_S


def was_lost_with_too_many(outcome: Outcome, losses: Sequence[RankResult]) -> bool:
    """Return whether the job was lost with too many of its processes, for no reason of its own."""
    if not outcome.over or not losses or outcome.interrupted_by is not None:
        return False
    first = outcome.first  # perhaps one that heard of the end, and raised it
    return first is None or first.is_consequence or "the job is over" in first.last_exception
