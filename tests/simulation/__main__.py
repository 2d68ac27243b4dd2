"""python -m simulation (in tests/): run many seeds on all processors, or tell the story of one."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from simulation.runner import Outcome, simulate, tell


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one, with its story")
    parser.add_argument("--whole", action="store_true", help="the whole story, not only its end")
    args = parser.parse_args()
    if args.seed is not None:
        outcome = simulate(args.seed)
        last = None if args.whole else 120
        print(tell(args.seed, last=last) if outcome.has_failed else _summary([outcome], 0.0))
        return int(outcome.has_failed)
    started_s = time.monotonic()
    failed = []
    outcomes = []
    with multiprocessing.Pool(os.cpu_count()) as pool:
        seeds = range(args.first, args.first + args.seeds)
        for outcome in pool.imap_unordered(simulate, seeds, chunksize=8):
            outcomes.append(outcome)
            if outcome.has_failed:
                failed.append(outcome.seed)
                print(f"seed {outcome.seed}: {outcome.violation.splitlines()[0]}", flush=True)
    if failed:
        print(tell(min(failed), last=None if args.whole else 120))
    print(_summary(outcomes, time.monotonic() - started_s))
    return int(bool(failed))


def _summary(outcomes: list[Outcome], took_s: float) -> str:
    ends = Counter(
        "over" if outcome.end_of_job else "whole" for outcome in outcomes if not outcome.has_failed
    )
    counted: Counter[str] = Counter()
    for outcome in outcomes:
        counted.update(outcome.counted)
    happened = ", ".join(f"{count:,} {what}" for what, count in sorted(counted.items()))
    return (
        f"{happened}\n{len(outcomes)} seeds, {sum(o.num_events for o in outcomes):,} events,"
        f" {sum(o.num_generations for o in outcomes):,} generations,"
        f" {sum(o.num_acked for o in outcomes):,} acknowledged additions in {took_s:.1f} s:"
        f" {ends['whole']} ended whole, {ends['over']} jobs were over (all copies or workers lost),"
        f" {sum(o.has_failed for o in outcomes)} failed"
    )


if __name__ == "__main__":
    sys.exit(main())
