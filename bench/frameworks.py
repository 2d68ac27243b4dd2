"""Other interfaces and other frameworks on Paceline's engine.

    python bench/frameworks.py              about 6 minutes
    python bench/frameworks.py --quick      a smoke test
    python bench/frameworks.py --alone      without the last two parts below

Horovod's interface for torch beside `pl.distribute`; then, if their environments are there, Horovod
itself (framework_runs/horovod_steps.py) and Keras (framework_runs/keras_steps.py).

Two workers, one thread each. Both trainings are in the same processes and take turns, so that both
see the same machine. Operations of 1 KB: in order (one name, blocking), and out of order (two names
that the ranks start in opposite order).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from framework_runs import horovod_steps, keras_steps
from harness.report import machine, write_json
from models import TASKS

import paceline as pl


def worker(rounds: int, steps: int, calls: int) -> dict[str, Any]:
    """Measure everything in one rank; the same on all."""
    import paceline.horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    return {**operations(hvd, rounds, calls), **training(hvd, rounds, steps)}


def operations(hvd: Any, rounds: int, calls: int) -> dict[str, list[float]]:
    """Return microseconds for each operation of 1 KB."""
    tensor, world = torch.ones(256), pl.world()
    found: dict[str, list[float]] = {"engine": [], "in order": [], "out of order": []}
    names = ["a", "b"] if hvd.rank() == 0 else ["b", "a"]

    def engine() -> None:
        world.all_reduce(tensor.clone(), op="mean")

    def in_order() -> None:
        hvd.allreduce(tensor, name="x")

    def out_of_order() -> None:
        started = [hvd.allreduce_async(tensor, name=name) for name in names]
        for handle in started:
            hvd.synchronize(handle)

    for round_ in range(rounds + 1):
        for (name, times), call in zip(
            found.items(), (engine, in_order, out_of_order), strict=True
        ):
            hvd.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            each = (time.perf_counter() - start) / calls / (2 if name == "out of order" else 1)
            if round_:
                times.append(each * 1e6)
    return found


def training(hvd: Any, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return milliseconds for each step of the 25 M MLP."""
    task = TASKS["mlp"]
    takes: dict[str, Any] = {}
    for name in ("distribute", "hvd"):
        torch.manual_seed(0)
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if name == "hvd":
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters()
            )
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        else:
            model, optimizer = pl.distribute(model, optimizer)
        takes[name] = (model, optimizer)
    x, y = task.make_batch(task.batch)
    found: dict[str, list[float]] = {name: [] for name in takes}
    for round_ in range(rounds + 1):
        for name, (model, optimizer) in takes.items():
            hvd.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                task.loss(model(x), y).backward()
                optimizer.step()
            if round_:
                found[name].append((time.perf_counter() - start) / steps * 1e3)
    return found


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    peers = horovod_steps.PEERS / "horovod" / "bin" / "python"
    parser.add_argument("--horovod", type=Path, default=peers, help="an interpreter that has it")
    parser.add_argument("--alone", action="store_true", help="without Horovod itself and Keras")
    options = parser.parse_args()
    quick = options.quick
    rounds, steps, calls = (2, 1, 50) if quick else (9, 4, 1000)
    found: Any = pl.launch(worker, rounds, steps, calls, workers=2)[0]
    medians = {name: statistics.median(times) for name, times in found.items()}
    ratio = medians["hvd"] / medians["distribute"]
    rows = [
        ("1 KB all-reduce of the engine, us", "engine", ""),
        ("hvd.allreduce of 1 KB, in order, us", "in order", "must 30, goal 10"),
        ("the same, out of order, us", "out of order", "must 500, goal 200"),
        ("25 M MLP, pl.distribute, ms", "distribute", ""),
        ("the same, hvd.DistributedOptimizer, ms", "hvd", ""),
    ]
    print(f"{'':40} {'minimum':>8} {'median':>8}")
    for label, name, wanted in rows:
        print(f"{label:40} {min(found[name]):8.1f} {medians[name]:8.1f}   {wanted}")
    fastest = min(found["hvd"]) / min(found["distribute"])
    print(f"{'ratio':40} {fastest:8.3f} {ratio:8.3f}   must 1.15, goal 1.03")
    if not options.alone:
        compare_others(found, options.horovod, quick=quick)
    write_json("frameworks", {"machine": machine(), "times": found, "medians": medians})


def compare_others(found: Any, horovod: Path, *, quick: bool) -> None:
    """Measure Horovod itself and Keras, where their environments are."""
    found["horovod"] = horovod_steps.run(horovod, quick=quick)
    if keras_steps.PYTHON.exists():
        found["keras"] = keras_steps.run(None, quick=quick)
    else:
        print(f"Keras: skipped, no interpreter at {keras_steps.PYTHON}")


if __name__ == "__main__":
    main()
