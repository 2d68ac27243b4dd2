"""Turns that are limited in time: a step takes 10 s with one contender and 0.2 s with another.

All contenders live for the whole run and train in interleaved rounds (harness/training.py). A turn
is one sample: the mean step in it, by the slower worker. The first turn at a rate is as short as
may be; later turns have as many steps as fit into the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.namespaces import Cable, one_millisecond_kb
from harness.rounds import Plan, Runner, interleave
from harness.training import Contender
from harness.training_kinds import kind_of


@dataclass(frozen=True)
class Amount:
    """How much is measured at each rate."""

    rounds: int
    turn_s: float  # about so long is a turn
    least_steps: int = 2  # in a turn, however long they take


@dataclass(frozen=True)
class Line:
    """What was measured of one contender at one rate."""

    name: str
    label: str
    turns_s: Sequence[float]  # mean step of each turn
    sent_bytes: float  # of a host in a step: the median over the turns


class Timed:
    """A contender at one rate of the link."""

    def __init__(self, contender: Contender, amount: Amount) -> None:
        self._contender, self._amount = contender, amount
        self._period = kind_of(contender.name).period
        self._sent: list[float] = []
        self.runner = Runner(contender.label, self._measure, contender.runner.version)

    def _measure(self, plan: Plan, seed: int) -> list[float]:
        if not plan.samples:
            return []  # it has done its first steps, see `settle`
        steps = steps_in(self._amount, self._period, self._taken())
        self._contender.runner.measure(replace(plan, samples=steps), seed)
        self._sent.append(self._contender.sent[-1])
        return [self._contender.turns_s[-1]]

    def _taken(self) -> list[float]:
        return self.runner.times.get(0, [])

    def line(self) -> Line:
        """Return what was measured; of one that failed there is nothing."""
        name, sent = self._contender.name, statistics.median(self._sent or [0.0])
        return Line(name, self._contender.label, self._taken(), sent)


def steps_in(amount: Amount, period: int, taken_s: Sequence[float]) -> int:
    """Return the steps of the next turn: whole periods, so that all turns are alike."""
    fitting = amount.turn_s / taken_s[-1] if taken_s else 0
    wanted = max(amount.least_steps, fitting)
    return max(1, round(wanted / period)) * period if period > 1 else int(wanted)


def settle(contenders: Sequence[Contender], times: int) -> None:
    """Let all do their first steps, on a link that is still fast: these are not counted."""
    for _ in range(times):
        interleave([c.runner for c in contenders], Plan(0, rounds=0, samples=0))


def measure(
    contenders: Sequence[Contender], cable: Cable, rate_mbit: int, amount: Amount
) -> list[Line]:
    """Shape the link, and give out the turns; those that fail say why and are left out."""
    cable.shape(rate_mbit, one_millisecond_kb(rate_mbit))
    timed = [Timed(one, amount) for one in contenders if not one.ranks.has_failed]
    interleave([one.runner for one in timed], Plan(0, amount.rounds, amount.least_steps))
    return [one.line() for one in timed if not one.runner.has_failed]
