"""All paces compared: final loss, slow workers, slow links, throughput and bytes.

    python bench/paces.py                                all parts; those with links need root
    python bench/paces.py --quick                        a smoke test: its figures mean nothing
    python bench/paces.py --only loss --paces local:8,async --seeds 3
    python docs/images/pace_curves.py bench/results/paces.json

Four workers learn the next letter of a book (and, for the final loss, the digits). Writes
paces.json and paces.md; a part that is measured again replaces its former self there. A pace that
this version does not know is left out with a line.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
from functools import partial
from pathlib import Path

from pace_runs import measure, parts, plans, table
from pace_runs.plans import QUICK, Sizes

PARTS = ("loss", "stragglers", "links", "throughput")
_RESULTS = Path(__file__).resolve().parent / "results"


def choose_rows(wanted: str) -> tuple[list[table.Row], list[str]]:
    """Return the rows to run, always with the reference, and the ones that are left out."""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    rows = table.choose([table.REFERENCE, *names] if names else [])
    return table.known(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, one seed")
    parser.add_argument("--only", choices=PARTS, action="append", help="may be given several times")
    parser.add_argument("--paces", default="", help="labels or names, with commas; default: all")
    parser.add_argument("--seeds", type=int, default=5, help="of the reference, for the noise")
    parser.add_argument("--pace-seeds", type=int, help="of every other pace (default: 3)")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="where the results go")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # must clean up as well
    sizes, seeds = (QUICK, min(options.seeds, 2)) if options.quick else (Sizes(), options.seeds)
    if options.pace_seeds:
        sizes = dataclasses.replace(sizes, pace_seeds=options.pace_seeds)
    rows, left_out = choose_rows(options.paces)
    for note in left_out:
        print(note)
    every = {
        "loss": partial(measure.loss, rows, sizes, seeds),
        "stragglers": partial(measure.stragglers, rows, sizes),
        "links": partial(measure.links, rows, sizes, plans.RATES_MBIT),
        "throughput": partial(measure.throughput, rows, sizes),
    }
    asked = parts.chosen(every, options.only)
    about = {"left_out": left_out}
    parts.carry_out(asked, options.out / "paces.json", about, quick=options.quick)


if __name__ == "__main__":
    main()
