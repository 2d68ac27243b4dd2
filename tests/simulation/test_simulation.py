"""Simulated jobs keep every promise, whatever goes wrong: a few hundred of them each time.

`make simulate SEEDS=10000` runs many more. A failure tells the story of the smallest plan that
still fails; `python -m simulation --seed N` (in tests/) tells it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.found import Found, found
from simulation.runner import simulate, tell

SEEDS = int(os.environ.get("PACELINE_SIMULATION_SEEDS", "240"))
BLOCK = 20


@pytest.mark.parametrize("one", found(), ids=lambda one: f"{one.plan.seed}: {one.what[:50]}")
def test_what_was_found_stays_fixed(one: Found) -> None:
    outcome = simulate(one.plan)
    if outcome.has_failed:
        pytest.fail(f"{one.what}\n{outcome.violation}\n{outcome.story}", pytrace=False)


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_any_job(first: int) -> None:
    for seed in range(first, first + BLOCK):
        if simulate(seed).has_failed:
            pytest.fail(tell(seed), pytrace=False)


def test_the_same_seed_is_the_same_story_in_every_process() -> None:
    program = (
        "from simulation.runner import simulate\n"
        "print([(o.num_events, o.num_acked, o.counted) for o in map(simulate, range(5))])\n"
    )
    tests = str(Path(__file__).parents[1])
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": tests, "PYTHONHASHSEED": salt},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(printed) == 1
