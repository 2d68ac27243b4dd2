"""Horovod itself beside Paceline's interface of the same names, in turns.

    python bench/framework_runs/horovod_steps.py           about a minute
    python bench/framework_runs/horovod_steps.py --quick   a smoke test

Horovod 0.28.1 does not compile with today's torch as it is; bench/README.md says how it was built.
Two workers, one thread each. Horovod exchanges over gloo, the only way it has without MPI.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness.report import machine, write_json  # noqa: E402

from framework_runs.turns import (  # noqa: E402
    Make,
    compare,
    describe,
    launched,
    one_thread,
    paceline_run,
    ratio,
)

PEERS = HERE.parent / "peers"
_RANK = "framework_runs.horovod_rank"


def _contenders(python: Path, kinds: list[str]) -> list[Make]:
    """Return what starts each kind; Horovod only if it is there."""
    env = one_thread()
    horovodrun = [str(python.with_name("horovodrun")), "--gloo", "-np", "2", str(python)]
    commands = {kind: paceline_run(Path(sys.executable)) for kind in kinds}
    for kind in kinds:
        if kind.startswith("horovod"):
            commands[kind] = horovodrun
    return [
        partial(launched, kind, kind, _RANK, command, env) for kind, command in commands.items()
    ]


def run(python: Path, *, quick: bool) -> dict[str, Any]:
    """Measure and print; return all times."""
    if not python.exists():
        print(f"Horovod: skipped, no interpreter at {python} (bench/README.md says how)")
        return {}
    rounds, steps = (1, 2) if quick else (7, 6)
    kinds = ["distribute", "ours", "horovod"]
    found = compare(_contenders(python, kinds), rounds=rounds, steps=steps)
    print(f"25 M MLP: {describe(found)}")
    print(f"  speed against Horovod  {ratio(found, 'horovod', 'ours')}   must 2, goal 3")
    print(f"  against pl.distribute  {ratio(found, 'ours', 'distribute')}   must 1.15, goal 1.03")
    small = compare(_contenders(python, ["ours 1 KB", "horovod 1 KB"]), rounds=rounds, steps=steps)
    print(f"20 all-reduces of 1 KB: {describe(small)}", flush=True)
    return {"mlp": found, "1 KB": small}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--horovod", type=Path, default=PEERS / "horovod" / "bin" / "python")
    options = parser.parse_args()
    times = run(options.horovod, quick=options.quick)
    write_json("horovod_steps", {"machine": machine(), "times": times})


if __name__ == "__main__":
    main()
