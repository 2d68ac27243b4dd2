"""What a trace costs: the same training with its steps traced and not, in turns.

    python bench/trace_cost.py               a small MLP (the hardest case) and one of 25 M
    python bench/trace_cost.py --quick       a smoke test: its figures mean nothing

Two workers with one thread each train in turns of some steps, of which every other one is traced as
`paceline run --trace` does it: recorded, and sent to the launcher. A turn's figure is the mean step
of the slowest worker. Between two turns all rest for a moment, so that what a turn has left to send
does not cost the next one.

Where nothing is traced, each place that could record looks at one attribute; that is timed alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import timeit
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import figures
from harness.report import machine, write_json

_MODELS = {"small": 400, "mlp": 8}  # steps of a turn
_REST_S = 0.3


def work(model: str, rounds: int, steps: int, out: Path) -> None:
    """Train, as one of the workers; the first one writes the mean steps of all turns."""
    import time

    import torch
    from models import TASKS
    from telemetry_runs.small import SMALL

    import paceline as pl
    from paceline.observe.telemetry.trace import TracedSteps, tracer

    job, task = pl.init(), SMALL if model == "small" else TASKS[model]
    torch.manual_seed(0)
    net = task.model()
    net, optimizer = pl.distribute(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    x, y = task.make_batch(task.batch)
    reported: dict[str, list[float]] = {"off": [], "on": []}

    def turn(name: str, count: int) -> None:
        tracer.stop()
        if name == "on":
            first = job.steps_done + 1
            wanted = TracedSteps(first, first + count)
            tracer.plan(wanted, job.env.rank, job.rendezvous.agent.report)
            tracer.begin(job.steps_done)
        pl.world().barrier()
        start_s = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            task.loss(net(x), y).backward()
            optimizer.step()
        took = torch.tensor([(time.perf_counter() - start_s) / count], dtype=torch.float64)
        pl.world().all_reduce(took, "max")
        reported[name].append(float(took))
        time.sleep(_REST_S)

    for name in reported:
        turn(name, max(1, steps // 10))
        reported[name].clear()
    for number in range(rounds):
        for name in ("off", "on") if number % 2 else ("on", "off"):
            turn(name, steps)
    tracer.stop()
    if pl.rank() == 0:
        out.write_text(json.dumps(reported), encoding="utf-8")


def compare(model: str, rounds: int, steps: int) -> dict[str, Any]:
    """Run the workers; show and return what they measured."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "turns.json"
        words = ["--worker", model, "--rounds", str(rounds), "--steps", str(steps)]
        command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--threads-per-worker", "1"]
        command += ["--trace", "1:2", "--log-dir", scratch, __file__, *words, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"the workers failed:\n{done.stderr}")
        turns: dict[str, list[float]] = json.loads(out.read_text(encoding="utf-8"))
    off, on = turns["off"], turns["on"]
    rounds_ = [one / other for one, other in zip(on, off, strict=True)]
    ratios = [min(on) / min(off), statistics.median(on) / statistics.median(off),
              statistics.median(rounds_)]  # fmt: skip
    print(f"\n{model}, 2 workers: {rounds} turns of {steps} steps each (ms for a step)")
    for name, times in (("not traced", off), ("traced", on)):
        low, middle = 1e3 * min(times), 1e3 * statistics.median(times)
        print(f"  {name:12} min {low:9.3f}  median {middle:9.3f}")
    print("  ratio by min {:.4f}, by median {:.4f}, median of rounds {:.4f}".format(*ratios))
    return {"model": model, "off_s": off, "on_s": on, "ratios": ratios}


def look_ns() -> float:
    """Return what a place costs that could record, and does not."""
    from paceline.observe.telemetry.trace import Tracer

    tracer, count = Tracer(), 200_000
    return min(timeit.repeat(tracer.start, number=count, repeat=5)) / count * 1e9


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} % by median"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(_MODELS), default=None)
    parser.add_argument("--rounds", type=int, help="turns of each (default: 20)")
    parser.add_argument("--steps", type=int, help="of a turn (default: about a second's)")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: bench/results)")
    parser.add_argument("--quick", action="store_true", help="the small model, few steps")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # be one, and train this model
    options = parser.parse_args()
    options.models = options.models or (["small"] if options.quick else list(_MODELS))
    options.rounds = options.rounds or (2 if options.quick else 20)
    if options.quick:
        options.steps = options.steps or 10
    return options


def main() -> None:
    options = arguments()
    if options.worker:
        work(options.worker, options.rounds, options.steps, options.out)
        return
    facts = machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    found = [compare(m, options.rounds, options.steps or _MODELS[m]) for m in options.models]
    lines = [
        (f"{one['model']}: step that is traced", "must <= +5 %", _percent(one["ratios"][1]))
        for one in found
    ]
    lines.append(("a place that does not record", "", f"{look_ns():.0f} ns"))
    figures.show(lines, "Figures")
    versions = {library: metadata.version(library) for library in ("paceline", "torch")}
    reported = {key: str(value) for key, value in vars(options).items()}
    content = {"machine": facts, "options": reported, "versions": versions, "found": found}
    print(f"written to {write_json('trace-cost', content, options.out)}")


if __name__ == "__main__":
    main()
