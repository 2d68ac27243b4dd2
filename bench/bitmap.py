"""What a vote on signs costs in a training step, and how many bytes it hands to others.

    python bench/bitmap.py                       2 workers on this host, the MLP of 25 M parameters
    python bench/bitmap.py --workers 4 --rounds 20
    python bench/bitmap.py --quick

The same model is trained at several paces in the same processes, one step each per round, so that a
burst of noise hits all of them alike. "Bits" is the time of a worker in which it packs (and tracks
its momentum), counts and unpacks, and its share of that worker's step; "bytes" what a worker hands
to others in a step, and what part that is of what a ring of float32 does. Minimum and median over
rounds and workers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from harness.report import machine, write_json
from models import TASKS

import paceline as pl
from paceline.data_parallel.distribute import _switchers
from paceline.pace.bitmap import pace as bitmap
from paceline.pace.bitmap import vote as ballot

PACES = (
    "allreduce[update=replicated]",
    "bitmap",
    "bitmap[momentum=0]",
    "bitmap[feedback=yes]",
)
_WARM_UP = 3


class Stopwatch:
    """Adds up the time that is spent in some functions of a module."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def watch(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                self.spent_s += time.perf_counter() - start_s

        setattr(owner, name, timed)


def prepare(pace: str, name: str) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return one step of training at a pace, and what has been handed to others so far."""
    task = TASKS[name]
    torch.manual_seed(1)
    plain = task.model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-5)
    model, optimizer = pl.distribute(plain, optimizer, pace=pace)
    torch.manual_seed(100 + pl.rank())
    batches = cycle(task.batches(4))
    exchange = _switchers[model].training.reducer._exchange

    def step() -> None:
        x, target = next(batches)
        optimizer.zero_grad()
        task.loss(model(x), target).backward()
        optimizer.step()

    return step, lambda: getattr(exchange, "sent_bytes", 0)


def run(name: str, rounds: int) -> dict[str, Any]:
    """Be one worker; return for every pace the times of its steps."""
    pl.init()
    watch = Stopwatch()
    watch.watch(bitmap.Voter, "vote")
    watch.watch(ballot, "majority")
    watch.watch(ballot, "unpack_signs")
    ways = {pace: prepare(pace, name) for pace in PACES}
    found: dict[str, Any] = {pace: {"step_s": [], "bits_s": [], "bytes": 0} for pace in PACES}
    for number in range(rounds + _WARM_UP):
        for pace, (step, sent) in ways.items():
            pl.world().barrier()
            start_s, spent_s, before = time.perf_counter(), watch.spent_s, sent()
            step()
            if number < _WARM_UP:
                continue
            found[pace]["step_s"].append(time.perf_counter() - start_s)
            found[pace]["bits_s"].append(watch.spent_s - spent_s)
            found[pace]["bytes"] = sent() - before
    return found


def show(workers: list[dict[str, Any]], num_elements: int) -> list[dict[str, Any]]:
    """Print the table; return its rows."""
    size, rows = len(workers), []
    ring = 2 * (size - 1) / size * 4 * num_elements
    print(f"{'pace':30} {'step min':>10} {'median':>10} {'bits min':>10} {'median':>10}", end="")
    print(f" {'share min':>10} {'median':>8} {'MB handed on':>13} {'of the ring':>12}")
    for pace in PACES:
        steps = [s for worker in workers for s in worker[pace]["step_s"]]
        bits = [s for worker in workers for s in worker[pace]["bits_s"]]
        shares = [part / whole for part, whole in zip(bits, steps, strict=True)]
        handed = statistics.fmean(worker[pace]["bytes"] for worker in workers) or ring
        row = {
            "pace": pace,
            "step_s": (min(steps), statistics.median(steps)),
            "bits_s": (min(bits), statistics.median(bits)),
            "share": (min(shares), statistics.median(shares)),
            "bytes": handed,
            "ring_bytes": ring,
        }
        rows.append(row)
        times = [f"{1e3 * value:7.1f} ms" for key in ("step_s", "bits_s") for value in row[key]]
        print(f"{pace:30} " + " ".join(f"{text:>10}" for text in times), end="")
        print(f" {row['share'][0]:>10.1%} {row['share'][1]:>8.1%}", end="")
        print(f" {handed / 1e6:>13.3f} {'1/' + format(ring / handed, '.1f'):>12}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", choices=sorted(TASKS), default="mlp")
    parser.add_argument("--rounds", type=int, default=12, help="steps at each pace")
    parser.add_argument("--quick", action="store_true", help="three steps")
    options = parser.parse_args()
    rounds, facts = 3 if options.quick else options.rounds, machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    num_elements = sum(p.numel() for p in TASKS[options.model].model().parameters())
    print(f"{TASKS[options.model].title}, {num_elements / 1e6:.1f} M, {options.workers} workers\n")
    workers: Any = pl.launch(run, options.model, rounds, workers=options.workers, timeout_s=1800)
    rows = show(workers, num_elements)
    path = write_json("bitmap", {"machine": facts, "options": vars(options), "rows": rows})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
