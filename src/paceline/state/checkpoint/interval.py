"""When to save: every so many steps, or about every so many seconds.

All workers must decide the same without communicating at every step. So seconds are converted to
steps: the workers agree on the time of a step, and from it follows the step of the next save. They
do so some steps after the start, and after each save.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Sequence

from paceline.errors import UsageError

Agree = Callable[[float], float]  # the largest of all workers' numbers; collective
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TEXT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|h)")
_FIRST_LOOK = 10  # steps before seconds are first converted to steps


class SaveSchedule:
    """Decides after which steps to save. Main thread only."""

    def __init__(self, every: int | str | None) -> None:
        self._steps, self._seconds = _parse(every)
        self._since, self._since_s = 0, time.monotonic()
        self.next_at: int | None = None  # the step of the next save, if `every` is a time
        self._plans_at: int | None = None

    def begin(self, steps: int) -> None:
        """Count from here."""
        self._since, self._since_s = steps, time.monotonic()
        self.next_at, self._plans_at = None, steps + _FIRST_LOOK

    def is_due(self, steps: int, agree: Agree) -> bool:
        """Return whether to save after this step; the same on all workers."""
        if self._steps is not None:
            return steps % self._steps == 0
        if self._seconds is None:
            return False
        if self.next_at is None and self._plans_at is not None and steps >= self._plans_at:
            self._plan(steps, agree)
        return self.next_at is not None and steps >= self.next_at

    def counts(self) -> list[int | None]:
        """Return what a joining worker needs to decide the same."""
        return [self._since, self.next_at, self._plans_at]

    def load(self, counts: Sequence[int | None]) -> None:
        """Load the counts of another worker."""
        since, self.next_at, self._plans_at = counts
        self._since = since or 0

    def _plan(self, steps: int, agree: Agree) -> None:
        assert self._seconds is not None
        took_s = time.monotonic() - self._since_s
        per_step_s = agree(took_s / max(1, steps - self._since))
        self.next_at = max(steps, self._since + max(1, round(self._seconds / per_step_s)))


def _parse(every: int | str | None) -> tuple[int | None, float | None]:
    wrong = UsageError(
        f"Checkpoint(every={every!r}): expected a number of steps (100), or a time: '30s', '10min',"
        " '1h'"
    )
    if every is None:
        return None, None
    if isinstance(every, str):
        found = _TEXT.fullmatch(every.strip())
        if found is None or float(found[1]) <= 0:
            raise wrong
        return None, float(found[1]) * _UNITS[found[2]]
    try:
        steps = operator.index(every)
    except TypeError:
        raise wrong from None
    if isinstance(every, bool) or steps < 1:
        raise wrong
    return steps, None
