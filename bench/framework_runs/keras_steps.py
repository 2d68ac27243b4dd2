"""Keras on Paceline: a step against one without communication, and servers against TensorFlow's.

    python bench/framework_runs/keras_steps.py              about 4 minutes
    python bench/framework_runs/keras_steps.py --quick      a smoke test
    python bench/framework_runs/keras_steps.py --only jax   torch, tensorflow, jax or servers

The frameworks have an environment of their own: make .venv-frameworks/.installed. Two workers, one
thread each, 25 M MLP, SGD. TensorFlow's servers are those of servers/tensorflow_chief.py: a custom
loop, because Keras 3 does not work with ParameterServerStrategy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness.report import machine, write_json  # noqa: E402
from harness.training import Work, compare  # noqa: E402

PYTHON = HERE.parents[1] / ".venv-frameworks" / "bin" / "python"
_WANTED = {
    "torch": "must 1.0, goal 0.8",
    "tensorflow": "must 1.3, goal 1.15",
    "jax": "must 1.2, goal 1.05",
}
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PACELINE_LOG_DIR": "none",
}


def run_job(backend: str, pace: str, rounds: int, steps: int, servers: int = 0) -> Any:
    """Return seconds for each step, by contender and round."""
    words = ["-m", "paceline", "run", "-n", "2", *(["-s", str(servers)] if servers else [])]
    command = [PYTHON, *words, HERE / "keras_rank.py", pace, rounds, steps]
    ended = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **_ONE_THREAD, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in ended.stdout.splitlines() if '{"alone"' in line]
    if ended.returncode != 0 or not found:
        sys.exit(f"{backend}, {pace}: failed\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
    return json.loads(found[0][found[0].index("{") :])


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=[*_WANTED, "servers"])
    options = parser.parse_args()
    if not PYTHON.exists():
        sys.exit(f"no interpreter at {PYTHON}: make .venv-frameworks/.installed")
    rounds, steps = (1, 2) if options.quick else (5, 6)
    times: dict[str, Any] = {}
    for backend, wanted in _WANTED.items():
        if options.only in (None, backend):
            times[backend] = run_job(backend, "allreduce", rounds, steps)
            alone, together = (statistics.median(times[backend][k]) for k in ("alone", "together"))
            line = f"{together * 1e3:.0f} ms, alone {alone * 1e3:.0f} ms: {together / alone:.2f} x"
            print(f"Keras on {backend:12} {line:40} {wanted}", flush=True)
    if options.only in (None, "servers"):
        times["servers"] = ours = run_job("tensorflow", "ps", rounds, steps, servers=1)
        [theirs] = compare(
            Work("mlp", "sgd", 2, tensorflow=PYTHON), ["tensorflow"], rounds=rounds, steps=steps
        )
        times["tensorflow servers"] = theirs.step_times()
        step_s = statistics.median(ours["together"])
        other_s = statistics.median(theirs.step_times())
        line = (
            f"{step_s * 1e3:.0f} ms, TensorFlow's {other_s * 1e3:.0f} ms: {other_s / step_s:.2f} x"
        )
        print(f"Keras through ps      {line:40} must 1.3, goal 2")
    write_json("keras_steps", {"machine": machine(), "times": times})


if __name__ == "__main__":
    main()
