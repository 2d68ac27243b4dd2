"""Model parallel training beside plain torch that does the same by hand on gloo.

    python bench/model_parallel.py                    everything, two processes with a thread each
    python bench/model_parallel.py --only tp          tp, pp, split, memory or fsdp; may be repeated
    python bench/model_parallel.py --quick            a smoke test: its figures mean nothing

tp      a GPT of 10.9 M parameters, its matrices split in two: the same plan with DTensor by hand
pp      the same in two stages, 8 microbatches: torch's Schedule1F1B with stages made by hand
split   the slowest stage of an automatic split beside that of the best of all cuts
memory  parameters and optimizer state of a process, of a GPT of 49.6 M parameters, and its PSS
fsdp    steps with sharded parameters: fully_shard by hand; and with replicated ones
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import figures
from harness.report import machine, write_json
from mesh_runs import contest, split
from mesh_runs.contest import Work
from mesh_runs.models import title_of
from mesh_runs.report import Figure, Table, bubble_figure, show_memory

_MICROBATCHES = 8
Found = tuple[dict[str, Any], list[Figure]]


def tensor(options: argparse.Namespace) -> Found:
    """Return ours beside the same plan by hand, with several batches."""
    by_hand = ["tp-gloo", "tp-gloo-kept"]
    tables = _compare(options, ["one", *by_hand, "tp-paceline", "tp-ours"], options.batches, "tp=2")
    lines = []
    for table in tables:
        table.show(by_hand)
        what = f"tp=2, batch {table.batch}, x DTensor on gloo"
        lines.append(table.figure(what, "must > 1, goal 1.5", "tp-ours", ["tp-gloo"]))
        kept = f"{what}, memory kept"
        lines.append(table.figure(kept, "", "tp-ours", ["tp-gloo-kept"]))
        backend = f"tp=2, batch {table.batch}, x DTensor on our backend"
        lines.append(table.figure(backend, "", "tp-ours", ["tp-paceline"]))
    return {"tables": [table.as_json() for table in tables]}, lines


def pipeline(options: argparse.Namespace) -> Found:
    """Return our schedules beside torch's, and the bubble of each."""
    by_hand, alone = ["pp-gloo", "pp-gloo-kept"], ["alone", "alone-kept"]
    ours = ["pp-ours", "pp-ours-zero", "pp-ours-interleaved"]
    names = ["one", *by_hand, "pp-paceline", *ours, *alone]
    (table,) = _compare(options, names, [2 * _MICROBATCHES], "pp=2")
    table.show(by_hand, _MICROBATCHES)
    lines = [
        table.figure("pp=2, 1f1b, x pipelining on gloo", "must >= 1", "pp-ours", ["pp-gloo"]),
        table.figure("pp=2, 1f1b, x the same, memory kept", "", "pp-ours", ["pp-gloo-kept"]),
        table.figure("pp=2, 1f1b, x pipelining on our backend", "", "pp-ours", ["pp-paceline"]),
        bubble_figure(table, "pp-gloo", _MICROBATCHES),
        bubble_figure(table, "pp-ours", _MICROBATCHES),
        table.figure("zero-bubble x 1f1b", "goal > 1", "pp-ours-zero", ["pp-ours"]),
    ]
    return {"tables": [table.as_json()]}, lines


def sharded(options: argparse.Namespace) -> Found:
    """Return sharded training beside fully_shard and beside replicated training."""
    by_hand = ["fsdp-gloo", "fsdp-gloo-kept"]
    names = [*by_hand, "fsdp-ours", "dp-gloo", "dp-ours"]
    tables = _compare(options, names, [1] if options.quick else [4], "fsdp=2")
    lines = []
    for table in tables:
        table.show(by_hand)
        what = f"fsdp=2, batch {table.batch} per process, x fully_shard on gloo"
        lines.append(table.figure(what, "", "fsdp-ours", ["fsdp-gloo"]))
    return {"tables": [table.as_json() for table in tables]}, lines


def memory(options: argparse.Namespace) -> Found:
    """Return what a process holds, and all the memory that it takes."""
    work = _work(options, "tiny" if options.quick else "large")
    names = ["dp-gloo", "dp-ours", "fsdp-gloo", "fsdp-ours"]
    found = {name: contest.memory_of(work, name, batch=1) for name in names}
    title = f"memory of a process, AdamW, {title_of(work.model)}"
    return found, show_memory(title, found, "dp-gloo")


def _compare(
    options: argparse.Namespace, names: Sequence[str], batches: Sequence[int], what: str
) -> list[Table]:
    work = _work(options, "tiny" if options.quick else "small")
    title = f"{what}: {title_of(work.model)}"
    print("\nstarting the processes of each contender ...", flush=True)
    contenders = contest.compare(work, names, batches)
    return [Table(title, batch, contenders) for batch in batches]


def _work(options: argparse.Namespace, model: str) -> Work:
    return Work(model, _MICROBATCHES, options.rounds, options.steps)


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "tp": tensor,
    "pp": pipeline,
    "split": lambda options: split.measure(quick=options.quick),
    "memory": memory,
    "fsdp": sharded,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(PARTS), help="default: all parts")
    parser.add_argument("--batches", nargs="+", type=int, help="of tp (default: 1 4 16)")
    parser.add_argument("--rounds", type=int, help="turns of each contender (default: 6)")
    parser.add_argument("--steps", type=int, help="steps in a turn (default: 3)")
    parser.add_argument("--out", type=Path, help="where the results go (default: bench/results)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    options = parser.parse_args()
    options.only = options.only or list(PARTS)
    options.batches = options.batches or ([1] if options.quick else [1, 4, 16])
    options.rounds = options.rounds or (1 if options.quick else 6)
    options.steps = options.steps or (2 if options.quick else 3)
    return options


def main() -> None:
    options = arguments()
    facts = machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    parts, rows = {}, list[Figure]()
    for name in options.only:
        parts[name], lines = PARTS[name](options)
        rows += lines
    figures.show(rows, "Figures")
    content = {
        "machine": facts,
        "options": {**vars(options), "out": str(options.out or "")},
        "versions": {library: metadata.version(library) for library in ("paceline", "torch")},
        "parts": parts,
        "figures": rows,
    }
    print(f"written to {write_json('model-parallel', content, options.out)}")


if __name__ == "__main__":
    main()
