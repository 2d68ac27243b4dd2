"""Parameter servers: ours beside torch's rpc, DDP, TensorFlow, and what memory and delays allow.

    python bench/parameter_server.py                   everything, about 12 minutes
    python bench/parameter_server.py --quick           a smoke test, about a minute
    python bench/parameter_server.py --parts stragglers
    python bench/parameter_server.py --tensorflow-python PATH    an interpreter that has TensorFlow

EXCHANGE: push and pull of 25 M float32 by 2 workers, SGD on 1 server. TRAINING: steps of an MLP
with 2 workers and 1 server on 2 cores. STRAGGLERS: 4 workers of which some are slow, beside a
simulation of the same delays, and the time to a loss. bench/README.md says more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import figures
from harness.report import machine, write_json
from harness.rounds import Plan
from harness.training import Work, compare
from harness.training_report import DDP, Comparison
from servers import exchange, straggler_report, stragglers
from servers.exchange import PS_LITE_GB_PER_S, Exchanges
from servers.stragglers import Effort, Findings

Line = tuple[str, str, str]

_PARTS = ("exchange", "training", "stragglers")
_OURS = "paceline async"  # as asynchronous as torch's rpc server
_ALL_REDUCE = ("replicated", "sharded")
_TENSORFLOW = Path(__file__).parent / "peers" / "tensorflow" / "bin" / "python"
_PLAN = Plan(100_000_000, rounds=8, samples=3)
_QUICK_PLAN = Plan(10_000_000, rounds=2, samples=2)
_EFFORT = Effort(rounds=5, horizon_s=8.0, learning_s=8.0)
_QUICK_EFFORT = Effort(rounds=1, horizon_s=0.8, learning_s=1.6, rates=(0.4,))
_NAMES = (DDP, *_ALL_REDUCE, "ps", "async", "ssp")
_QUICK_NAMES = (DDP, "sharded", "ps", "async")


def measure_training(options: argparse.Namespace) -> Comparison:
    """Train the MLP with all contenders, in turns."""
    names, python = [*(_QUICK_NAMES if options.quick else _NAMES)], options.tensorflow_python
    if python.exists():
        names.append("tensorflow")
    else:
        print(
            f"\ntensorflow: skipped, no interpreter at {python}; make an environment with"
            "\n  python -m venv ENV && ENV/bin/pip install tensorflow-cpu"
            "\nand name it: --tensorflow-python ENV/bin/python"
        )
    work = Work("mlp", "sgd", 2, tensorflow=python)
    print(f"\n{work.title}: starting {len(names)} contenders ...", flush=True)
    steps, rounds = (2, 2) if options.quick else (8, 8)
    return Comparison(work, compare(work, names, rounds=rounds, steps=steps))


def exchange_lines(found: Exchanges) -> list[Line]:
    rates = found.rates(_OURS)
    ps_lite = tuple(rate / PS_LITE_GB_PER_S for rate in rates) if rates else None
    rows = [
        ("push+pull / torch rpc", "must 4", found.ratio(_OURS, "torch rpc")),
        (f"push+pull / ps-lite, {PS_LITE_GB_PER_S} GB/s elsewhere", "must 4", ps_lite),
        ("push+pull / limit, two passes", "goal 0.5", found.ratio(_OURS, "limit: two")),
        ("push+pull / limit, best way", "", found.ratio(_OURS, "limit")),
    ]
    return [(figure, promise, _pair(ratio)) for figure, promise, ratio in rows]


def _pair(ratio: Sequence[float] | None) -> str:
    return f"{ratio[0]:.2f} by min, {ratio[1]:.2f} by median" if ratio else "not measured"


def training_lines(found: Comparison) -> list[Line]:
    rows = [
        ("MLP, ps / DDP gloo", "must 1", "ps", [DDP]),
        ("MLP, ps / better all-reduce of ours", "goal 0.85", "ps", _ALL_REDUCE),
        ("MLP, async / DDP gloo", "", "async", [DDP]),
        ("MLP, async / better all-reduce of ours", "", "async", _ALL_REDUCE),
        ("MLP, ps / TensorFlow servers", "must 3, goal 5", "ps", ["tensorflow"]),
        ("MLP, async / TensorFlow servers", "must 3, goal 5", "async", ["tensorflow"]),
    ]
    return [(figure, promise, _beside(found, name, of)) for figure, promise, name, of in rows]


def _beside(found: Comparison, name: str, references: Sequence[str]) -> str:
    """Compare throughput with the best of the references."""
    ratios = [ratio for other in references if (ratio := found.ratio(name, other)) is not None]
    if not ratios:
        return "not measured"
    return ", ".join(f"{min(r[by] for r in ratios):.2f} by {by}" for by in ratios[0])


def straggler_lines(found: Findings) -> list[Line]:
    steady, by_chance = found.steady, found.by_chance
    if not by_chance:
        return [("slow workers", "", "not measured")]

    def ratio(table: dict[str, stragglers.Throughputs], pace: str) -> str:
        measured = straggler_report.ratio(table, pace)
        predicted = straggler_report.predicted_ratio(table, pace)
        return f"{measured:.2f} by median; predicted {predicted:.2f}"

    agreement = straggler_report.agreement
    return [
        ("one steadily 4 x slower, async / ps", "must 2.5", ratio(steady, "async")),
        ("one steadily 4 x slower, ssp:3 / ps", "", ratio(steady, "ssp:3")),
        ("the same, measured / predicted", "", agreement(steady)),
        (
            f"the same, seconds to a loss of {stragglers.TARGET_LOSS}",
            "goal async < ps",
            straggler_report.time_to_loss(found.learnings),
        ),
        ("slow by chance, ssp:3 / ps", "must 1.25", ratio(by_chance, "ssp:3")),
        ("slow by chance, async / ps", "must 1.4", ratio(by_chance, "async")),
        ("slow by chance, measured / predicted", "goal 0.95 to 1.05", agreement(by_chance)),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few samples of small sizes")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument(
        "--tensorflow-python", type=Path, default=_TENSORFLOW, help="an interpreter that has it"
    )
    return parser.parse_args()


def main() -> None:
    options, facts = arguments(), machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    lines: list[Line] = []
    content: dict[str, Any] = {"machine": facts, "quick": options.quick}
    if "exchange" in options.parts:
        quick = (_QUICK_PLAN, exchange.FEW)
        exchanges = exchange.measure(*(quick if options.quick else (_PLAN, exchange.ALL)))
        exchanges.show()
        lines += exchange_lines(exchanges)
        content["exchange"] = exchanges.as_json()
    if "training" in options.parts:
        comparison = measure_training(options)
        comparison.show()
        lines += training_lines(comparison)
        content["training"] = comparison.as_json()
    if "stragglers" in options.parts:
        findings = stragglers.measure(_QUICK_EFFORT if options.quick else _EFFORT)
        straggler_report.show(findings)
        lines += straggler_lines(findings)
        content["stragglers"] = straggler_report.as_json(findings)
    figures.show(lines, "Figures")
    content["figures"] = [
        {"figure": figure, "promise": promise, "measured": measured}
        for figure, promise, measured in lines
    ]
    print(f"written to {write_json('parameter-server', content)}")


if __name__ == "__main__":
    main()
