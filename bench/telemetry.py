"""What it costs to see what happens: steps that are timed, and the launcher's live table.

    python bench/telemetry.py                a small MLP (the hardest case) and one of 25 M
    python bench/telemetry.py --display      CPU time of the launcher while four workers train
    python bench/telemetry.py --quick        a smoke test: its figures mean nothing

Two workers with one thread each train with telemetry on and off, in turns; telemetry_runs/steps.py
says how that is compared.
"""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import figures
from harness.report import machine, write_json
from models import TASKS
from telemetry_runs.display import launcher_share
from telemetry_runs.small import SMALL
from telemetry_runs.steps import compare, worst

_MODELS = {"small": (SMALL.title, 1000), "mlp": (TASKS["mlp"].title, 8)}  # title, steps of a turn


def measure_steps(options: argparse.Namespace) -> tuple[list[Any], list[tuple[str, str, str]]]:
    """Compare on and off for each model; return the figures, and lines for people."""
    found, lines = [], []
    for model in options.models:
        title, steps = _MODELS[model]
        pairs = compare(model, title, options.rounds, options.steps or steps)
        found += [{"model": model, **pair.as_json()} for pair in pairs]
        lines.append((f"{title}: step with telemetry", "must <= +1 %", worst(pairs)))
    return found, lines


def measure_display(options: argparse.Namespace) -> tuple[list[Any], list[tuple[str, str, str]]]:
    """Measure the launcher with and without its table, in turns."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(options.rounds):
        for on_terminal, shares in found.items():
            shares.append(launcher_share(options.seconds, on_terminal=on_terminal))
            what = "live table" if on_terminal else "output in a pipe"
            print(f"  launcher, {what:18} {shares[-1]:7.2%} of one core", flush=True)
    low = {on_terminal: min(shares) for on_terminal, shares in found.items()}
    lines = [
        ("launcher with the live table, 4 workers", "must < 2 %", f"{low[True]:.2%} of one core"),
        ("of it for the table", "", f"{low[True] - low[False]:.2%}"),
    ]
    return [{"terminal": found[True], "pipe": found[False]}], lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--display", action="store_true", help="the launcher's CPU time")
    parser.add_argument("--models", nargs="+", choices=list(_MODELS), default=None)
    parser.add_argument("--rounds", type=int, help="turns of each (default: 20; --display: 3)")
    parser.add_argument("--steps", type=int, help="of a turn (default: about a second's)")
    parser.add_argument("--seconds", type=float, help="of --display, each (default: 10)")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: bench/results)")
    parser.add_argument("--quick", action="store_true", help="the small model, few steps")
    options = parser.parse_args()
    options.models = options.models or (["small"] if options.quick else list(_MODELS))
    if options.quick:
        options.rounds, options.steps = options.rounds or 2, options.steps or 20
        options.seconds = options.seconds or 1.0
    options.rounds = options.rounds or (3 if options.display else 20)
    options.seconds = options.seconds or 10.0
    return options


def main() -> None:
    options, facts = arguments(), machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    name, measure = "telemetry", measure_steps
    if options.display:
        name, measure = "telemetry-display", measure_display
    found, lines = measure(options)
    figures.show(lines, "Figures")
    versions = {library: metadata.version(library) for library in ("paceline", "torch")}
    reported = {key: str(value) for key, value in vars(options).items()}
    content = {"machine": facts, "options": reported, "versions": versions, "found": found}
    print(f"written to {write_json(name, content, options.out)}")


if __name__ == "__main__":
    main()
