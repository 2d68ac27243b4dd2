"""Slow workers: the throughput of each pace beside what a simulation predicts, and time to a loss.

Four workers and one server; computing is a sleep, so that two cores are no limit. How many steps
each worker does comes from the simulation, up to a horizon: all paces then run equally long, and
no worker waits for a step that another worker will not do. Measured and predicted throughput are
the steps of all workers until the last of these steps ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.contenders import with_servers
from harness.ranks import ContenderFailed, RankSet
from harness.session import Session

from servers.delays import Delays, one_slow, sometimes_slow
from servers.simulation import bound_of, simulate

NUM_WORKERS, SLOW_FACTOR, CHANCE = 4, 4.0, 0.1
PACES = ("ps", "ssp:3", "async")
RATES = (0.1, 0.2, 0.4, 0.8)  # learning rates, of which each pace gets its best
TARGET_LOSS = 0.2
_BASE_S = 0.05  # of an ordinary step when throughput is measured
_LEARNING_BASE_S = 0.02


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    horizon_s: float
    learning_s: float
    rates: Sequence[float] = RATES


@dataclass
class Throughputs:
    """Steps per second of one pace in each round: measured and predicted."""

    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)  # by the delays that were asked for
    replayed: list[float] = field(default_factory=list)  # by the sleeps as they really were

    def shares(self, of: Sequence[float]) -> list[float]:
        return [mine / theirs for mine, theirs in zip(self.measured, of, strict=True)]


@dataclass(frozen=True)
class Learning:
    """One training: the loss over time, and when it first was below the target."""

    pace: str
    rate: float
    curve: list[tuple[float, float]]

    @property
    def reached_s(self) -> float | None:
        return next((at_s for at_s, loss in self.curve if loss < TARGET_LOSS), None)


class Stragglers:
    """The workers, and what was measured with them."""

    def __init__(self, session: Session) -> None:
        place = with_servers(NUM_WORKERS, 1)
        self._ranks = session.start(
            lambda: RankSet(
                "stragglers",
                "paceline",
                NUM_WORKERS,
                [place],
                session.scratch,
                module="servers.straggler_rank",
            )
        )
        self.is_ready = bool(session.wait_until_ready([self._ranks]))
        self.version = self._ranks.version

    def throughputs(self, rounds: Sequence[Delays], horizon_s: float) -> dict[str, Throughputs]:
        """Measure all paces in turns, with the same delays in each round."""
        found = {pace: Throughputs() for pace in PACES}
        for number, delays in enumerate(rounds):
            shift = number % len(PACES)
            for pace in (*PACES[shift:], *PACES[:shift]):
                self._measure(pace, delays, horizon_s, found[pace])
        return found

    def _measure(self, pace: str, delays: Delays, horizon_s: float, into: Throughputs) -> None:
        bound = bound_of(pace)
        forecast = simulate(delays.until(horizon_s), bound, horizon_s)
        answers = self._train(pace, delays, forecast.steps, RATES[0])
        taken_s = max(a["end_s"] for a in answers) - max(a["start_s"] for a in answers)
        into.measured.append(sum(forecast.steps) / taken_s)
        into.predicted.append(forecast.steps_per_s)
        into.replayed.append(simulate([a["slept_s"] for a in answers], bound).steps_per_s)

    def learn(self, pace: str, rate: float, horizon_s: float) -> Learning:
        """Train with one steadily slow worker."""
        delays = one_slow(NUM_WORKERS, _LEARNING_BASE_S, SLOW_FACTOR)
        steps = simulate(delays.until(horizon_s), bound_of(pace), horizon_s).steps
        answers = self._train(pace, delays, steps, rate, keeps_curve=True)
        return Learning(pace, rate, answers[0]["curve"])

    def _train(
        self,
        pace: str,
        delays: Delays,
        steps: Sequence[int],
        rate: float,
        keeps_curve: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the answers of the workers, by rank."""
        request = {"pace": pace, "delays": delays.as_request(), "steps": steps, "rate": rate}
        answers = self._ranks.ask({**request, "keeps_curve": keeps_curve})
        return sorted(answers, key=lambda answer: int(answer["rank"]))


@dataclass
class Findings:
    """Everything that was measured about slow workers; what failed is missing."""

    steady: dict[str, Throughputs] = field(default_factory=dict)
    by_chance: dict[str, Throughputs] = field(default_factory=dict)
    learnings: list[Learning] = field(default_factory=list)
    version: str = "?"


def measure(effort: Effort) -> Findings:
    """Start the workers and measure; a failure is printed and ends it."""
    print(f"\nslow workers: starting {NUM_WORKERS} workers and a server ...", flush=True)
    found = Findings()
    steady = one_slow(NUM_WORKERS, _BASE_S, SLOW_FACTOR)
    by_chance = [
        sometimes_slow(NUM_WORKERS, _BASE_S, CHANCE, SLOW_FACTOR, seed)
        for seed in range(effort.rounds)
    ]
    with Session() as session:
        workers = Stragglers(session)
        if not workers.is_ready:
            return found
        found.version = workers.version
        try:
            found.steady = workers.throughputs([steady] * effort.rounds, effort.horizon_s)
            found.by_chance = workers.throughputs(by_chance, effort.horizon_s)
            for pace in PACES:
                for rate in effort.rates:
                    found.learnings.append(workers.learn(pace, rate, effort.learning_s))
        except ContenderFailed as failure:
            print(f"  {failure}", flush=True)
    return found


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")
