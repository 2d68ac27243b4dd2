"""What is read off the measurements: noise, verdicts, times to a loss, ranks. No processes here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Curve = Sequence[Sequence[float]]  # (step, seconds, loss), in order of time
_ALLOWED_SD = 2.0


@dataclass(frozen=True)
class Noise:
    """How much the final loss of the reference differs from seed to seed."""

    mean: float
    sd: float

    @classmethod
    def of(cls, losses: Sequence[float]) -> Noise:
        return cls(statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0)

    def distance(self, losses: Sequence[float]) -> float:
        """Return by how many standard deviations the mean of these is worse than the reference."""
        difference = statistics.mean(losses) - self.mean
        if self.sd == 0.0:
            return math.copysign(math.inf, difference) if difference else 0.0
        return difference / self.sd

    def compare(self, losses: Sequence[float]) -> str:
        """Return whether these are within the noise, or by how much they are not."""
        if not all(math.isfinite(loss) for loss in losses):
            return "diverged"
        distance, difference = self.distance(losses), statistics.mean(losses) - self.mean
        if abs(distance) <= _ALLOWED_SD:
            return f"within {_ALLOWED_SD:g} sd"
        word = "worse" if distance > 0 else "better"
        return f"{abs(difference):.3f} {word} ({distance:+.1f} sd)"


def seconds_to(curve: Curve, target: float) -> float | None:
    """Return when the loss first was at the target, between two points on a straight line."""
    before: Sequence[float] | None = None
    for point in curve:
        _, at_s, loss = point
        if loss <= target:
            if before is None or before[2] == loss:
                return at_s
            share = (before[2] - target) / (before[2] - loss)
            return before[1] + share * (at_s - before[1])
        before = point
    return None


def target_of(reference: Curve) -> float:
    """Choose the loss to time all to: the reference's after 60 % of its steps, rounded up."""
    last_step = reference[-1][0]
    reached = next(loss for step, _, loss in reference if step >= 0.6 * last_step)
    return math.ceil(reached * 20) / 20


def rank(curves: Mapping[str, Curve], target: float) -> list[tuple[str, float | None]]:
    """Return names and seconds to the target, fastest first; others by loss."""
    times = {name: seconds_to(curve, target) for name, curve in curves.items()}

    def place(name: str) -> tuple[bool, float]:
        at_s, last = times[name], curves[name][-1][2]
        return (at_s is None, at_s if at_s is not None else last if last == last else math.inf)

    return [(name, times[name]) for name in sorted(curves, key=place)]


def steps_per_s(steps: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the steps of all workers by the time in which the last of them had done its own."""
    return sum(steps) / max(seconds)


def sent_per_step(steps: Sequence[int], sent: Sequence[int]) -> float:
    """Return the bytes that a host sent for each step of its worker."""
    return sum(sent) / sum(steps)
