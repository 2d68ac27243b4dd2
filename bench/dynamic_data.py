"""Time of an epoch when one worker is slower than the other workers, compared with the ideal.

    python bench/dynamic_data.py                     2 and 4 workers, the last one 2 x slower
    python bench/dynamic_data.py --factor 4 --workers 4
    python bench/dynamic_data.py --quick             a smoke test: its figures mean nothing

A sample takes so many milliseconds, in which the worker sleeps: computing for longer, without a
core. The ideal is all work divided by all speeds: those that were asked for, without a step of
training in it; and in parentheses the measured ones of the same workers where each has its own half
and no worker waits ("async, shard", which is the first). Contenders:
equal parts (mode "shard"), leases (mode "dynamic", at pace async), and parts of each global batch
by speed (batch="auto", at pace allreduce); "cost" has samples that take 1 to 8 times as long, in
order. The first epoch, which measures the speeds, is reported separately from the later ones.
Writes dynamic_data.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.report import machine

HERE = Path(__file__).resolve().parent
WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("async, shard", "async", {}),
    ("async, dynamic", "async", {"mode": "dynamic"}),
    ("async, dynamic, cost", "async", {"mode": "dynamic", "cost": True}),
    ("allreduce, shard", "allreduce", {}),
    ("allreduce, batch=auto", "allreduce", {"batch": "auto"}),
    ("allreduce, dynamic, cost", "allreduce", {"mode": "dynamic", "cost": True}),
]


def price(index: int, samples: int) -> float:
    """What a sample costs where costs differ: the expensive ones come last."""
    return 1.0 + 7.0 * index / samples


def train(plan: dict[str, Any], out: Path) -> None:
    """Be one worker: go over the data, sleep for each sample, and write down when."""
    import torch
    from torch.utils.data import DataLoader

    import paceline as pl

    pl.init()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = pl.distribute(model, optimizer, pace=plan["pace"])
    samples, options = plan["samples"], dict(plan["options"])
    prices = [1.0] * samples
    if options.pop("cost", False):
        prices = [price(index, samples) for index in range(samples)]
        options["cost"] = prices
    loader = DataLoader(range(samples), plan["batch"])
    each_s = plan["sample_s"] * plan["factors"][pl.rank()]
    epochs = []
    for _ in range(plan["epochs"]):
        sharded = pl.shard(loader, **options)
        pl.world().barrier()
        start_s, taken = time.monotonic(), 0
        for batch in sharded:
            output = model(torch.ones(len(batch), 64)).square().mean()
            time.sleep(each_s * sum(prices[index] for index in batch.tolist()))
            output.backward()
            optimizer.step()
            optimizer.zero_grad()
            taken += len(batch)
        epochs.append((start_s, time.monotonic(), taken))
        pl.world().barrier()
    (out / f"{pl.rank()}.json").write_text(json.dumps(epochs), encoding="utf-8")


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """Run one job; return the seconds of each epoch, the ideal, and the samples of each worker."""
    with tempfile.TemporaryDirectory(prefix="paceline-dynamic-") as directory:
        out = Path(directory)
        command = [sys.executable, "-m", "paceline", "run", "-n", str(len(plan["factors"]))]
        command += ["-s", "1"] if plan["pace"] == "async" else []
        command += [str(Path(__file__).resolve()), "--plan", json.dumps(plan), "--into", directory]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}\nended with code {done.returncode}")
        reported = [
            json.loads((out / f"{rank}.json").read_text(encoding="utf-8"))
            for rank in range(len(plan["factors"]))
        ]
    epochs = list(zip(*reported, strict=True))
    seconds = [max(e for _, e, _ in one) - min(s for s, _, _ in one) for one in epochs]
    samples = plan["samples"]
    with_cost = plan["options"].get("cost")
    work = sum(price(i, samples) if with_cost else 1.0 for i in range(samples))
    ideal_s = work * plan["sample_s"] / sum(1 / factor for factor in plan["factors"])
    return {
        "first_s": seconds[0],
        "later_s": seconds[1:],
        "ideal_s": ideal_s,
        "samples": [taken for _, _, taken in epochs[-1]],
        "speeds": [taken / (end_s - start_s) for start_s, end_s, taken in epochs[-1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--factor", type=float, default=2.0, help="of the slow worker")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="of each worker")
    parser.add_argument("--samples", type=int, default=1600, help="for each worker")
    parser.add_argument("--sample-ms", type=float, default=4.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plan", help=argparse.SUPPRESS)  # of a worker of a job
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        train(json.loads(options.plan), options.into)
        return
    if options.quick:
        options.workers, options.epochs, options.samples = [2], 2, 160
    facts = machine()
    print(f"machine {facts['idle_before']:.0%} idle, {facts['commit']}")
    found: dict[str, Any] = {"machine": {**facts, "quick": options.quick}}
    for workers in options.workers:
        print(f"\n{workers} workers, one of them {options.factor:g} x slower; seconds of an epoch")
        head = f"{'':26} {'first':>8} {'later':>8} {'ideal':>8} {'x ideal':>8}"
        print(f"{head} (measured)  samples of each")
        measured_s = 0.0
        for name, pace, how in WAYS:
            plan = {
                "pace": pace,
                "options": how,
                "samples": options.samples * workers,
                "batch": options.batch,
                "sample_s": options.sample_ms / 1000 / (4.5 if how.get("cost") else 1.0),
                "factors": [*[1.0] * (workers - 1), options.factor],
                "epochs": options.epochs,
            }
            result = measure(plan)
            later_s, ideal_s = statistics.median(result["later_s"]), result["ideal_s"]
            measured_s = measured_s or plan["samples"] / sum(result["speeds"])
            result["measured_ideal_s"] = measured_s
            print(
                f"{name:26} {result['first_s']:8.2f} {later_s:8.2f} {ideal_s:8.2f}"
                f" {later_s / ideal_s:8.3f} ({later_s / measured_s:8.3f})  {result['samples']}",
                flush=True,
            )
            found[f"{workers} workers, {name}"] = {**plan, **result}
    (HERE / "results").mkdir(exist_ok=True)
    path = HERE / "results" / "dynamic_data.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
