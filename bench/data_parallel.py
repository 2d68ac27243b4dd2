"""Training steps of one process, independent processes, DDP and Paceline, side by side.

    python bench/data_parallel.py                    all models, both optimizers, 2 and 4 workers
    python bench/data_parallel.py --quick            a smoke test
    python bench/data_parallel.py --hooks            what the reducer costs: 500 small tensors
    python bench/data_parallel.py --memory           memory of each worker
    sudo python bench/data_parallel.py --network     the MLP, two network namespaces over TCP

One thread per process. N processes that train without communicating are the ceiling. Paceline makes
malloc keep large blocks that were freed, which saves a plain process time too; so the ceiling is
measured with and without that, and every share is given of both. bench/README.md says more.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from harness import figures
from harness.namespaces import Cable
from harness.report import machine, write_json
from harness.training import Work, compare, memory_of
from harness.training_kinds import KINDS
from harness.training_rank import OPTIMIZERS
from harness.training_report import CEILING, DDP, KEPT, Comparison, promise, show_memory
from models import TASKS

_OURS = ["replicated", "sharded"]
_ON_ONE_HOST = ["one", CEILING, KEPT, DDP, "ddp-paceline", *_OURS]
_WITHOUT_ONE = [CEILING, KEPT, DDP, *_OURS]
_MEMORY = [CEILING, DDP, *_OURS]
_MODELS = ["mlp", "resnet", "gpt"]
_MEMORY_COLUMNS = ("workers", "total MB", "per worker", "shared", "anonymous", "files")


def measure(
    works: Sequence[Work], default: Sequence[str], options: argparse.Namespace
) -> list[Comparison]:
    """Compare the contenders at each work; show and return the results."""
    names = options.contenders or default
    found = []
    for work in works:
        print(f"\n{work.title}: starting {len(names)} contenders ...", flush=True)
        contenders = compare(work, names, rounds=options.rounds, steps=options.steps)
        found.append(Comparison(work, contenders))
        found[-1].show()
    return found


def works_on_one_host(options: argparse.Namespace) -> list[Work]:
    """Everything that was asked for; four workers share two cores only for the MLP by default."""
    models, workers = options.models or _MODELS, options.workers or [2, 4]
    return [
        Work(model, optimizer, world)
        for world in workers
        for model in models
        for optimizer in options.optimizers
        if options.workers or options.models or world == 2 or model == "mlp"
    ]


def closing_lines(found: Sequence[Comparison]) -> list[tuple[str, str, str]]:
    """The promised figures."""

    def figure(models: list[str], names: list[str], reference: str, world: int = 2) -> str:
        return promise(found, models, names, reference, world)

    both, mlp, others = _OURS, ["mlp"], ["resnet", "gpt"]
    high, higher = "must 0.88, goal 0.93", "must 0.95, goal 1.00"
    four = "must 1.4"
    return [
        ("MLP, 2 workers, DDP gloo / ceiling", "", figure(mlp, [DDP], CEILING)),
        ("MLP, 2, replicated / ceiling", high, figure(mlp, ["replicated"], CEILING)),
        ("MLP, 2, replicated / ceiling, memory kept", "", figure(mlp, ["replicated"], KEPT)),
        ("MLP, 2, sharded / ceiling", higher, figure(mlp, ["sharded"], CEILING)),
        ("MLP, 2, sharded / ceiling, memory kept", "", figure(mlp, ["sharded"], KEPT)),
        ("ResNet, GPT, 2, better / ceiling", "must 0.95, goal 0.99", figure(others, both, CEILING)),
        ("ResNet, GPT, 2, better / ceiling, memory kept", "", figure(others, both, KEPT)),
        ("ResNet, GPT, 2, better / DDP gloo", "must 1", figure(others, both, DDP)),
        ("MLP, 4 workers, better / DDP gloo", four, figure(mlp, both, DDP, 4)),
        ("MLP, 4 workers, better / ceiling", "goal 0.90", figure(mlp, both, CEILING, 4)),
        ("MLP, 4, better / ceiling, memory kept", "", figure(mlp, both, KEPT, 4)),
    ]


def network_lines(found: Sequence[Comparison]) -> list[tuple[str, str, str]]:
    return [
        ("MLP, better / DDP gloo", "must 1.3", promise(found, ["mlp"], _OURS, DDP, 2)),
        ("MLP, better / ceiling", "", promise(found, ["mlp"], _OURS, CEILING, 2)),
        ("MLP, better / ceiling, memory kept", "", promise(found, ["mlp"], _OURS, KEPT, 2)),
    ]


def show_figures(lines: Sequence[tuple[str, str, str]], title: str) -> None:
    """Print those that were measured; by fastest step, median step and median turn."""
    figures.show([line for line in lines if line[2]], title)


def measure_network(options: argparse.Namespace) -> list[Comparison]:
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        raise SystemExit(f"data_parallel: --network needs root, ip, unshare, nsenter ({missing=})")
    with Cable() as cable:
        works = [
            Work(model, optimizer, 2, cable)
            for model in options.models or ["mlp"]
            for optimizer in options.optimizers
        ]
        return measure(works, [CEILING, KEPT, DDP, "ddp-paceline", *_OURS], options)


def measure_memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for model in options.models or ["mlp"]:
        for world in options.workers or [2, 4]:
            work = Work(model, "adamw", world)
            print(f"\n{work.title}: memory (PSS) after {options.steps} steps, sums of all workers")
            print(f"{'contender':25} " + " ".join(f"{name:>10}" for name in _MEMORY_COLUMNS))
            for name in options.contenders or _MEMORY:
                if workers := memory_of(work, name, options.steps):
                    row = show_memory(KINDS[name].label, workers)
                    rows.append({"model": model, "contender": name, **row, "by_worker": workers})
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--network", action="store_true", help="two namespaces over TCP; needs root")
    what.add_argument("--hooks", action="store_true", help="overhead with 500 parameter tensors")
    what.add_argument("--memory", action="store_true", help="memory of each worker, AdamW")
    parser.add_argument("--models", nargs="+", choices=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS))
    parser.add_argument("--workers", nargs="+", type=int, help="numbers of workers")
    parser.add_argument("--contenders", nargs="+", choices=list(KINDS))
    parser.add_argument("--steps", type=int, help="counted steps in each turn")
    parser.add_argument("--rounds", type=int, help="turns of each contender")
    parser.add_argument("--quick", action="store_true", help="one model, few steps")
    options = parser.parse_args()
    if options.quick:
        options.models = options.models or (None if options.hooks else ["mlp"])
        options.optimizers = options.optimizers or ["sgd"]
        options.workers = options.workers or [2]
    options.optimizers = options.optimizers or list(OPTIMIZERS)
    options.steps = options.steps or (2 if options.quick else 20 if options.hooks else 6)
    options.rounds = options.rounds or (2 if options.quick else 6)
    return options


def main() -> None:
    options, facts = arguments(), machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    found: list[Comparison] = []
    memory: list[dict[str, Any]] = []
    name = "data-parallel"
    if options.memory:
        name, memory = f"{name}-memory", measure_memory(options)
    elif options.hooks:
        works = [
            Work(model, optimizer, world)
            for model in options.models or ["stack"]
            for optimizer in options.optimizers
            for world in options.workers or [2]
        ]
        name, found = f"{name}-hooks", measure(works, _WITHOUT_ONE, options)
        lines = [line for comparison in found for line in comparison.overhead_lines()]
        show_figures(lines, "Added to a step of the faster ceiling")
    elif options.network:
        name, found = f"{name}-network", measure_network(options)
        show_figures(network_lines(found), "Figures, each at its worst optimizer")
    else:
        found = measure(works_on_one_host(options), _ON_ONE_HOST, options)
        show_figures(closing_lines(found), "Figures, each at its worst model and optimizer")
    versions = {library: metadata.version(library) for library in ("paceline", "torch")}
    print("versions: " + ", ".join(f"{library} {v}" for library, v in versions.items()))
    content = {
        "machine": facts,
        "options": vars(options),
        "versions": versions,
        "sections": [comparison.as_json() for comparison in found],
        "memory": memory,
    }
    print(f"written to {write_json(name, content)}")


if __name__ == "__main__":
    main()
