"""The choice among predictions, with hysteresis, and the two lines that explain it.

`auto` takes the pace with the most samples per second. A pace that is not exact must be 10 % faster
than one that is. The current pace counts as 8 % faster than it is, so that a small change of the
predictions does not change the pace: from exact to rounded gradients needs a gain of 19 %, and the
way back is taken when both are within 2 %.

With a given pace and a budget, the mildest variant that fits is taken instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import UsageError
from paceline.planner.automatic.budget import mbit_text, wire_bytes_per_s, within_budget
from paceline.planner.candidates import Candidate
from paceline.planner.cluster import Cluster
from paceline.planner.predict import Prediction, predict
from paceline.planner.profile import ModelProfile
from paceline.planner.quantities import NO_STRAGGLER, Straggler
from paceline.planner.ranking import reason_of
from paceline.planner.statistical_cost import statistical_cost
from paceline.planner.step_costs import ON_MEASURED_LINKS
from paceline.runtime.formatting import duration_range, short_duration

INEXACT_GAIN = 1.10
CURRENT_BONUS = 1.08
_BUDGET_MARGIN = 1.15  # for a milder variant than the current one
_STRAGGLER = 1.5


class Situation(NamedTuple):
    """What the workers of a job have measured."""

    profile: ModelProfile
    cluster: Cluster
    straggler: Straggler = NO_STRAGGLER
    copies: int = 1  # processes on one machine during the measurement
    bandwidth_cv: float = 0.0
    free_bytes: float = float("inf")  # memory that is left on the fullest host

    def predict(self, one: Candidate) -> Prediction:
        """Return the prediction of one candidate."""
        return predict(
            one,
            self.profile,
            self.cluster,
            straggler=self.straggler,
            constants=ON_MEASURED_LINKS,
            copies=self.copies,
            bandwidth_cv=self.bandwidth_cv,
        )


@dataclass(frozen=True)
class Choice:
    """A chosen pace, its prediction, and that of the pace that was measured."""

    prediction: Prediction
    plain: Prediction
    max_wire: float | None

    @property
    def pace(self) -> str:
        """The pace as text."""
        return str(self.prediction.candidate.pace)

    def lines(self, why: str = "") -> tuple[str, str]:
        """Return the choice and its reason, and what it costs."""
        one, plain = self.prediction, self.plain
        text = (
            f"{one.candidate.label}: predicted {short_duration(one.step_s)} per step"
            f" ({duration_range(one.low_s, one.high_s)})"
        )
        if one.candidate != plain.candidate:
            text += f", {plain.candidate.label} {short_duration(plain.step_s)}"
        text += f"; {reason_of(one, plain)}"
        if self.max_wire is not None:
            text += (
                f"; sends {mbit_text(wire_bytes_per_s(one))} per host of at most"
                f" {mbit_text(self.max_wire)}"
            )
        return f"{why}{': ' if why else ''}{text}", _effect(one.candidate)


def choose(
    measured: Candidate,
    candidates: Sequence[Candidate],
    situation: Situation,
    *,
    current: str = "",
    max_wire: float | None = None,
    wire_factor: float = 1.0,
    in_order: bool = False,
    hint: str = "",
) -> Choice:
    """Choose among candidates. `measured` is the pace of the first steps, `current` that of now.

    `wire_factor`: how much more is sent than predicted. `in_order`: take the first one that fits
    into the budget. Raises UsageError if none does, or if the job can run none of them.
    """
    if not candidates:
        raise UsageError("this job can run none of the paces that may be chosen; give one: --pace")
    plain = situation.predict(measured)
    every = [situation.predict(one) for one in candidates]
    fitting = [one for one in every if _fits_memory(one, plain, situation)] or every[:1]
    budget = None if max_wire is None else max_wire / wire_factor
    allowed = within_budget(fitting, budget, hint)
    if in_order and budget is not None:
        return Choice(_mildest(allowed, current, budget), plain, max_wire)
    return Choice(max(allowed, key=lambda one: weight(one, current)), plain, max_wire)


def weight(one: Prediction, current: str) -> float:
    """Return the samples per second that count in the choice."""
    counted = one.samples_per_s
    if not one.candidate.is_exact:
        counted /= INEXACT_GAIN
    if str(one.candidate.pace) == current:
        counted *= CURRENT_BONUS
    return counted


def straggler_among(compute_s: Sequence[float]) -> Straggler:
    """Return the worker that is slower than the others, if one stands out."""
    if len(compute_s) < 2:
        return NO_STRAGGLER
    ordered = sorted(compute_s)
    usual = ordered[(len(ordered) - 1) // 2]
    factor = ordered[-1] / usual if usual > 0 else 1.0
    slow = sum(one > usual * _STRAGGLER for one in ordered)
    return Straggler(factor, workers=slow) if slow else NO_STRAGGLER


def _fits_memory(one: Prediction, plain: Prediction, situation: Situation) -> bool:
    """Return whether a host has the memory that a pace needs beyond the measured one."""
    more = (one.memory_bytes - plain.memory_bytes) * situation.cluster.most_workers
    return more <= situation.free_bytes


def _mildest(allowed: Sequence[Prediction], current: str, max_wire: float) -> Prediction:
    """Return the first variant; one before the current pace needs a margin."""
    for one in allowed:
        if str(one.candidate.pace) == current:
            return one
        if not current or wire_bytes_per_s(one) * _BUDGET_MARGIN <= max_wire:
            return one
    return allowed[-1]


def _effect(one: Candidate) -> str:
    cost = statistical_cost(one)
    if cost.source == "exact":
        words = "exact: equals one process with the global batch"
    elif cost.source == "unknown":
        words = "changes the training, and the effect on the loss is unknown"
    else:
        words = f"changes the training: loss {cost.text} on our two tasks, docs/choosing-a-pace.md"
    return f"{words}. `paceline set pace=...` or --pace chooses another"
