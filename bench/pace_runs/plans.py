"""How much is measured, and the trainings of each part, as lines of the plan (train.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servers.delays import Delays, one_slow, sometimes_slow

from pace_runs.shares import shares
from pace_runs.table import Row

NUM_WORKERS = 4
SLOW_FACTOR, CHANCE = 4.0, 0.1
RATES_MBIT = (1000, 100)
BATCHES = {"book": 64, "digits": 16}  # of each worker
# Compared with independent processes.
STREAMING = ("allreduce", "local:8", "local:8 streaming", "diloco:50", "diloco:50 streaming")


@dataclass(frozen=True)
class Sizes:
    """How much is done; steps are those of each worker, in lockstep."""

    book_steps: int = 640
    digits_steps: int = 400
    timed_steps: int = 320  # with slow workers, and on links
    copies: int = 20  # points of each curve
    pace_seeds: int = 3
    rounds: int = 2  # of throughput
    throughput_steps: int = 400  # several blocks of the longest, or its bytes are not right
    # What a step sleeps instead of computing. Long enough that the real rest of it, of four
    # workers on two cores, does not matter much; short enough that a slow link does.
    sleep_s: float = 0.010
    throughput_sleep_s: float = 0.020


QUICK = Sizes(
    book_steps=48,
    digits_steps=48,
    timed_steps=48,
    copies=3,
    pace_seeds=1,
    rounds=1,
    throughput_steps=100,
)


def line(row: Row, task: str, steps: Sequence[int], seed: int, copies: int) -> dict[str, Any]:
    """Return one training, on all workers, without delays."""
    return {
        "id": f"{task}/{row.label}/{seed}",
        "task": task,
        "pace": row.text(max(steps)),
        "optimizer": row.optimizers.get(task, ""),
        "seed": seed,
        "batch": BATCHES[task],
        "steps": list(steps),
        "delays": None,
        "copies": copies,
        "stands_aside": row.bound is not None,
        "meets_in": "",
    }


def losses(row: Row, sizes: Sizes, seeds: int) -> list[dict[str, Any]]:
    """Return the trainings for the final loss: both tasks, some seeds."""
    every = {"book": sizes.book_steps, "digits": sizes.digits_steps}
    return [
        line(row, task, [steps] * NUM_WORKERS, seed, sizes.copies)
        for task, steps in every.items()
        for seed in range(seeds)
    ]


def one_process(sizes: Sizes, seeds: int, row: Row) -> list[dict[str, Any]]:
    """Return the same for one process, which takes the batches of all workers at once."""
    return [
        {**run, "steps": run["steps"][:1], "batch": run["batch"] * NUM_WORKERS}
        for run in losses(row, sizes, seeds)
    ]


def scenarios(sizes: Sizes) -> dict[str, Delays]:
    """Return the kinds of slow workers."""
    return {
        "steady": one_slow(NUM_WORKERS, sizes.sleep_s, SLOW_FACTOR),
        "stalls": sometimes_slow(NUM_WORKERS, sizes.sleep_s, CHANCE, SLOW_FACTOR, seed=1),
    }


def timed(row: Row, sizes: Sizes, delays: Delays) -> dict[str, Any]:
    """Return a training with delays; all workers together do the same number of steps."""
    steps = shares(row, sizes.timed_steps * NUM_WORKERS, NUM_WORKERS, delays)
    run = line(row, "book", steps, 0, sizes.copies)
    return {**run, "pace": row.text(sizes.timed_steps), "delays": delays.as_request()}


def throughput(row: Row, sizes: Sizes, meets_in: str = "") -> dict[str, Any]:
    """Return a training that is only timed; with a place to meet in, of independent processes."""
    delays = one_slow(NUM_WORKERS, sizes.throughput_sleep_s, 1.0)
    run = line(row, "book", [sizes.throughput_steps] * NUM_WORKERS, 0, copies=1)
    return {**run, "delays": delays.as_request(), "meets_in": meets_in}
