"""Run many simulated jobs on all processors, or tell the story of one."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from simulation.found import Found, keep
from simulation.job import PRODUCTION
from simulation.mutants import MUTANTS
from simulation.runner import Outcome, shrink, simulate, tell


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one, with its story if it fails")
    parser.add_argument("--whole", action="store_true", help="the whole story, not only its end")
    parser.add_argument("--mutant", choices=MUTANTS, help="with a core that is broken on purpose")
    parser.add_argument("--keep", metavar="WHAT", help="keep the plan for ever: what was wrong")
    args = parser.parse_args()
    return _one(args) if args.seed is not None else _many(args)


def _one(args: argparse.Namespace) -> int:
    cores = MUTANTS[args.mutant].cores if args.mutant else PRODUCTION
    outcome = simulate(args.seed, cores)
    if not outcome.has_failed:
        print(_summary([outcome], 0.0))
        return 0
    print(tell(args.seed, cores, last=None if args.whole else 120))
    if args.keep:
        keep(Found(args.keep, shrink(args.seed, cores)[0], args.mutant or ""))
    return 1


def _many(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    outcomes: list[Outcome] = []
    with multiprocessing.Pool(os.cpu_count()) as pool:
        seeds = range(args.first, args.first + args.seeds)
        for outcome in pool.imap_unordered(simulate, seeds, chunksize=8):
            outcomes.append(outcome)
            if outcome.has_failed:
                print(f"seed {outcome.seed}: {outcome.violation.splitlines()[0]}", flush=True)
    failed = [outcome.seed for outcome in outcomes if outcome.has_failed]
    if failed:
        print(tell(min(failed), last=None if args.whole else 120))
    print(_summary(outcomes, time.monotonic() - started_s))
    return int(bool(failed))


def _summary(outcomes: list[Outcome], took_s: float) -> str:
    counted: Counter[str] = Counter()
    for outcome in outcomes:
        counted.update(outcome.counted)
    over = sum(bool(outcome.end_of_job) for outcome in outcomes if not outcome.has_failed)
    failed = sum(outcome.has_failed for outcome in outcomes)
    happened = ", ".join(f"{count:,} {what}" for what, count in sorted(counted.items()))
    return (
        f"{happened}\n{len(outcomes):,} seeds, {sum(o.num_events for o in outcomes):,} events,"
        f" {sum(o.num_generations for o in outcomes):,} generations,"
        f" {sum(o.num_acked for o in outcomes):,} acknowledged additions in {took_s:.0f} s:"
        f" {len(outcomes) - over - failed:,} jobs were whole in the end, {over:,} were over (nobody"
        f" was left with a partition, or too few workers), {failed:,} failed"
    )


if __name__ == "__main__":
    sys.exit(main())
