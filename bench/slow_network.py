"""Training over a slow link: compressed gradients beside DDP's hooks and the ceiling.

    sudo python bench/slow_network.py                    1 Gbit/s and 100 Mbit/s
    sudo python bench/slow_network.py --quick            a smoke test: its figures mean nothing
    sudo python bench/slow_network.py --rates 50 --paces allreduce local:8
    sudo python bench/slow_network.py --per-host 2 --unencrypted --rates 1000 \\
        --others independent --paces 'allreduce[compress=topk:0.01+int8]' diloco:50

An MLP of 25 M parameters, SGD, one worker with one thread on each of two hosts, or more: network
namespaces joined by a cable that is shaped with tbf. Independent processes are the ceiling. A pace
that this version does not know is left out with a line. A contender that does not finish a turn is
stopped, and the others continue. The namespaces vanish with this process.
"""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path

from harness import figures
from harness.namespaces import Cable, can_shape
from harness.report import machine, write_json
from harness.session import Session
from harness.training import Work, doubts, start
from harness.training_kinds import at_pace
from models import TASKS
from slow_runs import codecs, turns
from slow_runs.report import CEILING, FP16, KEPT, PLAIN, POWERSGD, Link

_OTHERS = [CEILING, KEPT, PLAIN, FP16, POWERSGD]
_QUICK_PACES = (codecs.REFERENCE, codecs.with_codec("int8"))


def measure(names: list[str], options: argparse.Namespace) -> list[Link]:
    """Start all contenders once; measure and show them at each rate."""
    amount = turns.Amount(options.rounds, options.turn_s)
    found, num_workers = [], 2 * options.per_host
    with Cable() as cable, Session() as session:
        print(f"\nstarting {num_workers} workers of each contender ...", flush=True)
        work = Work(options.model, "sgd", num_workers, cable)
        contenders = start(session, work, names)
        turns.settle(contenders, options.settle)
        samples = TASKS[options.model].batch * num_workers
        for rate_mbit in options.rates:
            lines = turns.measure(contenders, cable, rate_mbit, amount)
            found.append(Link(rate_mbit, samples, lines, names))
            found[-1].show()
        for line in doubts([one for one in contenders if not one.ranks.has_failed]):
            print(f"  {line}", flush=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", type=int, help="Mbit/s (default: 1000 100)")
    parser.add_argument("--paces", nargs="+", help="ours (default: allreduce, and with each codec)")
    parser.add_argument("--per-host", type=int, default=1, help="workers on each of the two hosts")
    parser.add_argument("--unencrypted", action="store_true", help="ours a second time, so")
    parser.add_argument("--others", nargs="*", choices=_OTHERS, help="default: all")
    parser.add_argument("--codec", help="the pace of the closing figures (default: the fastest)")
    parser.add_argument("--model", choices=list(TASKS), default="mlp")
    parser.add_argument("--rounds", type=int, help="turns of each contender at each rate")
    parser.add_argument("--turn-s", type=float, help="seconds of a turn; never under 2 steps")
    parser.add_argument("--settle", type=int, default=1, help="times 3 uncounted first steps")
    parser.add_argument("--out", type=Path, help="where the results go (default: bench/results)")
    parser.add_argument("--quick", action="store_true", help="short turns, few contenders")
    options = parser.parse_args()
    quick = options.quick
    options.rates = options.rates or ([1000] if quick else [1000, 100])
    options.paces = options.paces or (_QUICK_PACES if quick else codecs.PACES)
    options.others = _OTHERS if options.others is None else options.others
    options.rounds = options.rounds or (2 if quick else 6)
    options.turn_s = options.turn_s or (1.0 if quick else 4.0)
    return options


def main() -> None:
    options = arguments()
    if why := can_shape():
        raise SystemExit(f"slow_network: cannot run here: {why}")
    facts = machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    paces, left_out = codecs.known(options.paces)
    for note in left_out:
        print(f"  {note}")
    ours = [at_pace(pace) for pace in paces]
    if options.unencrypted:
        ours += [at_pace(pace, encrypted=False) for pace in paces]
    links = measure([*options.others, *ours], options)
    codec = at_pace(options.codec) if options.codec else None
    rows = [figure for link in links for figure in link.figures(codec)]
    figures.show(rows, "Figures, of one pace that averages the gradients of every step")
    versions = {library: metadata.version(library) for library in ("paceline", "torch")}
    print("versions: " + ", ".join(f"{library} {v}" for library, v in versions.items()))
    content = {
        "machine": facts,
        "options": {**vars(options), "out": str(options.out or "")},
        "versions": versions,
        "left_out": left_out,
        "links": [link.as_json() for link in links],
    }
    print(f"written to {write_json('slow-network', content, options.out)}")


if __name__ == "__main__":
    main()
