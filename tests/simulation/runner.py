"""Runs seeds, and makes a failing one small enough to read."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from simulation.job import PRODUCTION, Cores, Plan, SimJob, plan
from simulation.world import Violation


@dataclass(frozen=True)
class Outcome:
    """What came of one seed."""

    seed: int
    violation: str
    num_events: int
    num_acked: int
    num_generations: int
    end_of_job: str
    counted: Mapping[str, int]
    story: str = ""

    @property
    def has_failed(self) -> bool:
        return bool(self.violation)


def simulate(chosen: Plan | int, cores: Cores = PRODUCTION) -> Outcome:
    """Run one job; a program error counts as a violation too."""
    chosen = plan(chosen) if isinstance(chosen, int) else chosen
    job = SimJob(chosen, cores)
    violation = ""
    try:
        job.run()
    except Violation as error:
        violation = str(error)
    except Exception as error:  # whatever the cores raise that nobody has caught is a bug
        violation = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
    oracle = job.oracle
    return Outcome(
        seed=chosen.seed,
        violation=violation,
        num_events=job.world.num_events,
        num_acked=oracle.num_acked,
        num_generations=max(oracle.memberships, default=0),
        end_of_job=oracle.end_of_job,
        counted=dict(oracle.counted),
        story=job.world.story() if violation else "",
    )


def shrink(seed: int, cores: Cores = PRODUCTION, *, within_s: float = 20.0) -> tuple[Plan, Outcome]:
    """Leave out faults as long as something still goes wrong."""
    smallest = plan(seed)
    outcome = simulate(smallest, cores)
    until_s = time.monotonic() + within_s
    again = True
    while again and time.monotonic() < until_s:
        again = False
        for fault in list(smallest.faults):
            candidate = smallest.without(fault)
            attempt = simulate(candidate, cores)
            if attempt.has_failed:
                smallest, outcome, again = candidate, attempt, True
    return smallest, outcome


def tell(seed: int, cores: Cores = PRODUCTION, *, last: int | None = 120) -> str:
    """Tell the story of a failing seed."""
    smallest, outcome = shrink(seed, cores)
    lines = outcome.story.splitlines()
    if last is not None and len(lines) > last:
        lines = [f"   ... {len(lines) - last} lines before ...", *lines[-last:]]
    faults = [f"  {f.at_s:8.3f} s  {f.kind} ({f.lasts_s:.2f} s)" for f in smallest.faults]
    policy = smallest.policy
    return "\n".join(
        [
            f"seed {seed}: {outcome.violation}",
            f"{policy.num_workers} workers, {policy.num_servers} servers, {policy.replicas} copies"
            f" of {policy.partitions} partitions, {smallest.mode}, on_loss={policy.on_loss},"
            f" {len(set(smallest.hosts))} hosts; replay: python -m simulation --seed {seed}",
            "faults that it takes:",
            *(faults or ["  none"]),
            *lines,
        ]
    )
