"""What a checkpoint costs: how long training stands still for it, and how much slower it is.

    python bench/checkpoint.py                   2 workers on this host, a state of 100 MB
    python bench/checkpoint.py --every-s 30 --rounds 12
    python bench/checkpoint.py --quick

An MLP of 12.5 M parameters with momentum: 50 MB each. Stretches of as many steps as take about
`--every-s` seconds alternate: one with a save at its beginning, one without. "Stall" is how long
`save()` kept the script, beside a step; "overhead" how much longer a stretch with a save takes than
the one beside it. Minimum and median. The files are removed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import cycle
from typing import Any

import torch
from harness.report import machine, write_json
from torch import nn

import paceline as pl

_WARM_UP = 5
_WIDTH = 2048


def make_model() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(_WIDTH, _WIDTH, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def run(directory: str, every_s: float, rounds: int) -> dict[str, Any]:
    """Be one worker; return the times of steps, stalls and stretches."""
    pl.init()
    torch.manual_seed(1)
    plain = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9)
    model, optimizer = pl.distribute(plain, optimizer)
    checkpoint = pl.Checkpoint(directory, keep=1)
    batches = cycle([torch.randn(128, _WIDTH) for _ in range(4)])

    def step() -> None:
        optimizer.zero_grad()
        model(next(batches)).square().mean().backward()
        optimizer.step()
        checkpoint.step()

    def stretch(count: int) -> float:
        pl.world().barrier()
        start_s = time.perf_counter()
        for _ in range(count):
            step()
        pl.world().barrier()
        return time.perf_counter() - start_s

    stretch(_WARM_UP)
    step_s = torch.tensor([stretch(_WARM_UP) / _WARM_UP])
    pl.world().all_reduce(step_s, "max")
    count = max(2, round(every_s / float(step_s)))
    checkpoint.save()  # the first one makes the memory for the copy
    checkpoint.wait()
    found: dict[str, Any] = {"steps": count, "plain_s": [], "saving_s": [], "stall_s": []}
    for _ in range(rounds):
        found["plain_s"].append(stretch(count))
        pl.world().barrier()
        start_s = time.perf_counter()
        checkpoint.save()
        found["stall_s"].append(time.perf_counter() - start_s)
        found["saving_s"].append(found["stall_s"][-1] + stretch(count))
        checkpoint.wait()
    return found


def show(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the figures; return them."""
    first = workers[0]
    steps = [s / first["steps"] for s in first["plain_s"]]
    stalls = [s for worker in workers for s in worker["stall_s"]]
    pairs = zip(first["plain_s"], first["saving_s"], strict=True)
    overheads = [saving / plain - 1 for plain, saving in pairs]
    row = {
        "step_s": (min(steps), statistics.median(steps)),
        "stall_s": (min(stalls), statistics.median(stalls), max(stalls)),
        "overhead": (min(overheads), statistics.median(overheads)),
        "stretch_s": statistics.median(first["plain_s"]),
    }
    in_all = sum(first["saving_s"]) / sum(first["plain_s"]) - 1
    print(
        f"{'a step':24} {1e3 * row['step_s'][0]:8.1f} ms min {1e3 * row['step_s'][1]:8.1f} median"
    )
    stall = [1e3 * value for value in row["stall_s"]]
    print(
        f"{'stall of a save':24} {stall[0]:8.1f} ms min {stall[1]:8.1f} median {stall[2]:.1f} max"
    )
    print(f"{'stall beside a step':24} {row['stall_s'][1] / row['step_s'][1]:8.2f} x by median")
    low, middle = row["overhead"]
    print(f"{'overhead':24} {low:8.1%} min {middle:10.1%} median {in_all:.1%} of all time", end="")
    print(f", one save every {row['stretch_s']:.1f} s")
    return {**row, "overhead_in_all": in_all}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=8, help="stretches with and without a save")
    parser.add_argument("--quick", action="store_true", help="two stretches of a second")
    options = parser.parse_args()
    every_s, rounds = (1.0, 2) if options.quick else (options.every_s, options.rounds)
    facts = machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    with tempfile.TemporaryDirectory() as directory:
        arguments = (directory, every_s, rounds)
        workers: Any = pl.launch(run, *arguments, workers=options.workers, timeout_s=1800)
    found = show(workers)
    path = write_json("checkpoint", {"machine": facts, "options": vars(options), **found})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
