"""What compression does to the loss: with the same samples, and over time on slow links.

    sudo python bench/codec_loss.py                      both parts; without root only the first
    sudo python bench/codec_loss.py --quick              a smoke test: its figures mean nothing
    python bench/codec_loss.py --only loss --codecs int8 topk:0.05 --seeds 3
    python docs/images/pace_curves.py bench/results/codecs.json

As bench/paces.py, with codecs in place of paces: four workers learn the next letter of a book (and,
for the final loss, the digits) and average the gradients of every step, compressed, each codec with
its defaults. Writes codecs.json and codecs.md. A codec that this version lacks is left out with a
line.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
from functools import partial
from pathlib import Path

from pace_runs import measure, parts, table
from pace_runs.plans import QUICK, Sizes
from slow_runs.codecs import CODECS, rows

RATES_MBIT = (1000, 100, 10)
_RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, two seeds")
    parser.add_argument("--only", choices=("loss", "links"), action="append", help="one part only")
    parser.add_argument("--codecs", nargs="+", default=CODECS, help="default: all")
    parser.add_argument("--seeds", type=int, default=5, help="of every codec, and without one")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="where the results go")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # must clean up as well
    seeds = min(options.seeds, 2) if options.quick else options.seeds
    sizes = dataclasses.replace(QUICK if options.quick else Sizes(), pace_seeds=seeds)
    chosen, left_out = table.known(rows(options.codecs))
    for note in left_out:
        print(note)
    every = {
        "loss": partial(measure.loss, chosen, sizes, seeds),
        "links": partial(measure.links, chosen, sizes, RATES_MBIT),
    }
    about = {"title": "Codecs", "of": "codec", "left_out": left_out}
    asked = parts.chosen(every, options.only)
    parts.carry_out(asked, options.out / "codecs.json", about, quick=options.quick)


if __name__ == "__main__":
    main()
