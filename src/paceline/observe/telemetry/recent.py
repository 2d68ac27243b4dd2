"""The last seconds of one worker: how fast it is, and where its time goes.

`Recent` follows the steps that the training hooks time, `Trail` any count that grows (the script's
own step numbers, bytes). Both look at a window of a few seconds, so that a stall shows up soon.
`Course` follows how much of the script's loop is behind it, to say how long the rest will take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from paceline.observe.telemetry.step_times import StepTimes

WINDOW_S = 8.0
_MOST_APART_S = 30.0  # clocks of two hosts that differ by more were never compared
_MOST_MARKS = 128  # of a course
_ANOTHER_LOOP = 0.5
_FIRST_GUESS_S = 3.0  # before that, the time left would be anybody's guess


class Trail:
    """A count that grows, over the last seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=256)

    def add(self, at_s: float, count: float) -> None:
        """Take in the count at a moment; one that is smaller than before begins anew."""
        if self._marks and count < self._marks[-1][1]:
            self._marks.clear()
        if not self._marks or count > self._marks[-1][1]:
            self._marks.append((at_s, count))

    def per_s(self, now_s: float, *, is_running: bool) -> float | None:
        """Return how fast it grows; of one that has ended: how fast it did."""
        if len(self._marks) < 2:
            return None
        until_s = now_s if is_running else self._marks[-1][0]
        while len(self._marks) > 2 and until_s - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()
        (first_s, first), (_, last) = self._marks[0], self._marks[-1]
        elapsed_s = until_s - first_s
        return (last - first) / elapsed_s if elapsed_s > 0 else None


class _Mark(NamedTuple):
    """Sums up to a moment."""

    at_s: float
    samples: int = 0
    took_s: float = 0.0
    input_s: float = 0.0
    wait_s: float = 0.0


class Recent:
    """The timed steps of one worker, over the last seconds."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque(maxlen=256)

    def add(self, steps: Sequence[StepTimes], now_s: float) -> None:
        """Take in the steps of one report."""
        if not steps:
            return
        if not self._marks:  # the first step also took what came before the training
            self._marks.append(_Mark(_near(steps[0].end_s, now_s)))
            steps = steps[1:]
            if not steps:
                return
        last = self._marks[-1]
        self._marks.append(
            _Mark(
                _near(steps[-1].end_s, now_s),
                last.samples + sum(step.samples for step in steps),
                last.took_s + sum(step.took_s for step in steps),
                last.input_s + sum(step.input_s for step in steps),
                last.wait_s + sum(step.wait_s for step in steps),
            )
        )

    def samples_per_s(self, now_s: float, *, is_running: bool) -> float | None:
        """Return how many samples it uses; None where nobody counts them."""
        marks = self._window(now_s if is_running else None)
        if marks is None or not marks[1].samples:
            return None
        first, last = marks
        elapsed_s = (now_s if is_running else last.at_s) - first.at_s
        return (last.samples - first.samples) / elapsed_s if elapsed_s > 0 else None

    def shares(self, now_s: float) -> tuple[float, float] | None:
        """Return in percent of its time: waiting for input, and for others."""
        marks = self._window(now_s)
        if marks is None:
            return None
        first, last = marks
        took_s = last.took_s - first.took_s
        if took_s <= 0:
            return None
        input_s, wait_s = last.input_s - first.input_s, last.wait_s - first.wait_s
        return min(100.0, 100 * input_s / took_s), min(100.0, 100 * wait_s / took_s)

    def _window(self, until_s: float | None) -> tuple[_Mark, _Mark] | None:
        if len(self._marks) < 2:
            return None
        until_s = self._marks[-1].at_s if until_s is None else until_s
        while len(self._marks) > 2 and until_s - self._marks[0].at_s > WINDOW_S:
            self._marks.popleft()
        return self._marks[0], self._marks[-1]


class Course:
    """How much of its loop a script has behind it: 0 to 1, at some moments."""

    def __init__(self) -> None:
        self.done = 0.0
        self._marks: list[tuple[float, float]] = []

    def add(self, at_s: float, done: float) -> None:
        """Take in a share. Where a round has several passes it falls back a little, which is
        ignored; one that is far back is of another loop."""
        if done < self.done - _ANOTHER_LOOP:
            self._marks.clear()
        elif self._marks and done <= self.done:
            return
        self.done = min(done, 1.0)
        self._marks.append((at_s, self.done))
        if len(self._marks) > _MOST_MARKS:
            self._marks = self._marks[::2]

    def left_s(self, now_s: float) -> float | None:
        """Return how long the rest will take at the speed of the later half of the time so far."""
        if len(self._marks) < 2:
            return None
        last_s, last = self._marks[-1]
        half_s = (self._marks[0][0] + last_s) / 2
        first_s, first = next(m for m in reversed(self._marks[:-1]) if m[0] <= half_s)
        if last_s - first_s < _FIRST_GUESS_S:
            return None
        whole_s = (1 - last) * (last_s - first_s) / (last - first)
        return max(0.0, whole_s - (now_s - last_s))


def _near(end_s: float, now_s: float) -> float:
    """Return when a step ended; as it was heard of, if its clock cannot be trusted."""
    return end_s if abs(now_s - end_s) < _MOST_APART_S else now_s
