"""Keras on Paceline: a step against one without communication, and servers against TensorFlow's.

    python bench/framework_runs/keras_steps.py              about 4 minutes
    python bench/framework_runs/keras_steps.py --quick      a smoke test
    python bench/framework_runs/keras_steps.py --only jax   torch, tensorflow, jax or servers

The frameworks have an environment of their own: make .venv-frameworks/.installed. Two workers, one
thread each, 25 M MLP, SGD. All contenders of a comparison live at the same time and take turns.
TensorFlow's servers are those of servers/tensorflow_chief.py: a custom loop, because Keras 3 does
not work with ParameterServerStrategy.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness.contenders import in_private_network  # noqa: E402
from harness.ranks import Process, RankSet  # noqa: E402
from harness.report import machine, write_json  # noqa: E402

from framework_runs.turns import (  # noqa: E402
    compare,
    describe,
    independent,
    launched,
    one_thread,
    paceline_run,
    ratio,
)

PYTHON = HERE.parents[1] / ".venv-frameworks" / "bin" / "python"
_RANK = "framework_runs.keras_rank"
_WANTED = {
    "torch": "must 1.0, goal 0.8",
    "tensorflow": "must 1.3, goal 1.15",
    "jax": "must 1.2, goal 1.05",
}


def steps_of(backend: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Measure a step alone, alone with memory kept, and together."""
    env = one_thread(backend)
    alone = [partial(independent, kind, kind, _RANK, PYTHON, env) for kind in ("plain", "kept")]
    together = partial(launched, "together", "allreduce", _RANK, paceline_run(PYTHON), env)
    return compare([*alone, together], rounds=rounds, steps=steps)


def with_servers(rounds: int, steps: int) -> dict[str, list[float]]:
    """Measure Keras on TensorFlow through our server, and TensorFlow's own servers."""
    env = one_thread("tensorflow")
    ours = partial(launched, "paceline", "ps", _RANK, paceline_run(PYTHON, servers=1), env)
    return compare([ours, _tensorflow], rounds=rounds, steps=steps)


def _tensorflow(scratch: Path) -> RankSet:
    place = Process(in_private_network("tensorflow", [str(PYTHON)]), one_thread())
    module = "servers.tensorflow_chief"  # it speaks for all
    return RankSet("tensorflow", "tensorflow", 1, [place], scratch, module=module)


def run(only: str | None, *, quick: bool) -> dict[str, Any]:
    """Measure and print; return all times."""
    rounds, steps = (1, 2) if quick else (7, 6)
    times: dict[str, Any] = {}
    for backend, wanted in _WANTED.items():
        if only in (None, backend):
            found = times[backend] = steps_of(backend, rounds, steps)
            print(f"Keras on {backend}: {describe(found)}")
            print(f"  together / plain {ratio(found, 'together', 'plain')}   {wanted}")
            print(f"  together / kept  {ratio(found, 'together', 'kept')}", flush=True)
    if only in (None, "servers"):
        found = times["servers"] = with_servers(rounds, steps)
        print(f"Keras on TensorFlow through ps: {describe(found)}")
        print(f"  speed {ratio(found, 'tensorflow', 'paceline')}   must 1.3, goal 2", flush=True)
    return times


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=[*_WANTED, "servers"])
    options = parser.parse_args()
    if not PYTHON.exists():
        sys.exit(f"no interpreter at {PYTHON}: make .venv-frameworks/.installed")
    times = run(options.only, quick=options.quick)
    write_json("keras_steps", {"machine": machine(), "times": times})


if __name__ == "__main__":
    main()
