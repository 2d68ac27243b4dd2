"""Interleaving: every contender has a turn in every round, so that noise hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from harness.limit import MODES, LimitRanks
from harness.ranks import ContenderFailed, RankSet


@dataclass(frozen=True)
class Plan:
    """How much of one operation is measured."""

    num_bytes: int
    rounds: int
    samples: int  # in each round, for each contender
    warmup: int = 1  # uncounted samples in each round
    calls: int = 1  # calls in each sample, without a pause between them


@dataclass
class Runner:
    """One line of the table: an operation of a contender on some kind of memory."""

    label: str
    measure: Callable[[Plan, int], list[float]]  # plan, seed: seconds for each call
    version: str
    times: dict[int, list[float]] = field(default_factory=dict)  # by size
    has_failed: bool = False


def collective(label: str, ranks: RankSet, op: str, memory: str = "ordinary") -> Runner:
    """A runner for an operation of a set of ranks."""

    def measure(plan: Plan, seed: int) -> list[float]:
        request = {
            "op": op,
            "memory": memory,
            "bytes": plan.num_bytes,
            "samples": plan.samples,
            "warmup": plan.warmup,
            "calls": plan.calls,
            "seed": seed,
        }
        return [seconds / plan.calls for seconds in ranks.turn(request)]

    return Runner(label, measure, ranks.version)


def limits(ranks: LimitRanks) -> list[Runner]:
    """Runners for all ways of reaching the shared-memory limit."""

    def mode_runner(mode: int) -> Runner:
        def measure(plan: Plan, _: int) -> list[float]:
            return ranks.turn(mode, plan.num_bytes, plan.warmup, plan.samples)

        return Runner(f"limit: {MODES[mode]}", measure, ranks.version)

    return [mode_runner(mode) for mode in range(len(MODES))]


def interleave(runners: Sequence[Runner], plan: Plan) -> None:
    """Measure all runners in turns, each round beginning with another one.

    A runner that fails says so and is out for the rest of the run.
    """
    for runner in runners:  # memory is mapped and connections are made on first use
        _turn(runner, replace(plan, samples=0, warmup=1), 0)
    for number in range(plan.rounds):
        shift = number % max(1, len(runners))
        for runner in [*runners[shift:], *runners[:shift]]:
            _turn(runner, plan, number * (plan.samples + plan.warmup))


def _turn(runner: Runner, plan: Plan, seed: int) -> None:
    if runner.has_failed:
        return
    try:
        taken = runner.measure(plan, seed)
    except ContenderFailed as failure:
        print(f"  {failure}", flush=True)
        runner.has_failed = True
        runner.times.pop(plan.num_bytes, None)
        return
    if plan.samples > 0:
        runner.times.setdefault(plan.num_bytes, []).extend(taken)
