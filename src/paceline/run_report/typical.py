"""One step to look at closely: of all steps, the one whose duration is the median.

Which step that is, is known at the end; keeping all of them until then would need memory without
bound. So every n-th is kept, and n doubles whenever there are too many: some dozens of whole steps
are enough to find a typical one among.
"""

from __future__ import annotations

from paceline.telemetry.steps import StepTimes

_MAX_KEPT = 64


class TypicalStep:
    """Keeps steps with the times of all their workers."""

    def __init__(self) -> None:
        self._every = 1
        self._kept: dict[int, dict[int, StepTimes]] = {}

    def add(self, worker: int, step: StepTimes) -> None:
        """Take in a step of a worker."""
        if step.step % self._every or step.took_s <= 0:
            return
        self._kept.setdefault(step.step, {})[worker] = step
        while len(self._kept) > _MAX_KEPT:
            self._every *= 2
            self._kept = {at: told for at, told in self._kept.items() if at % self._every == 0}

    def choose(self) -> dict[int, StepTimes]:
        """Return the times of all workers in a typical step; of none when there was none.

        The first step is left out where there are others: it sets things up.
        """
        told = {at: workers for at, workers in self._kept.items() if at > 1} or self._kept
        if not told:
            return {}
        most = max(len(workers) for workers in told.values())
        whole = [workers for workers in told.values() if len(workers) == most]
        whole.sort(key=lambda workers: max(step.took_s for step in workers.values()))
        return dict(sorted(whole[len(whole) // 2].items()))
