"""Batches per second that reach a trainer: a DataLoader with two processes beside data workers.

    sudo python bench/data_pipeline.py [--quick]

On one host both have a trainer and two processes that make batches; they differ in how a batch gets
from one to the other. Then two more data workers are on a second host (a network namespace), which
a DataLoader cannot use. With fewer cores than processes a second host adds none here: "waiting"
simulates augmentation on free cores, by sleeping as long as it would take.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.namespaces import Cable, can_shape
from harness.report import machine, write_json

_FEED = str(Path(__file__).resolve().parent / "data_runs" / "feed.py")
_BATCHES = {"light": 400, "heavy": 150, "waiting": 100}
_BATCH_SIZE = 64
_PORT = 18620
_LIMIT_S = 300

Way = Callable[[str, list[str]], dict[str, float]]


def in_process(cost: str, sizes: list[str]) -> dict[str, float]:
    """The trainer's own DataLoader."""
    return read(run([sys.executable, _FEED, "dataloader", cost, *sizes]))


def data_workers(cost: str, sizes: list[str]) -> dict[str, float]:
    """As many data workers on the same host."""
    launcher = [sys.executable, "-m", "paceline", "run", "-n", "1", "--data-workers", "2"]
    return read(run([*launcher, _FEED, "pipeline", cost, *sizes]))


def on_two_hosts(cable: Cable) -> Way:
    """Two data workers beside the trainer, two at the other end of the cable."""

    def way(cost: str, sizes: list[str]) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            secret = Path(folder) / "secret"
            secret.touch(mode=0o600)
            secret.write_text(secrets.token_hex(32), encoding="ascii")
            shared = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PACELINE_JOB": f"bench-{secrets.token_hex(6)}",
                "PACELINE_COORDINATOR": f"{cable.addresses[0]}:{_PORT}",
                "PACELINE_SECRET_FILE": str(secret),
                "PACELINE_DATA_WORKERS": "4",
            }
            command = [sys.executable, _FEED, "pipeline", cost, *sizes]
            makers = [
                subprocess.Popen(
                    [*cable.enter(number // 2), *command],
                    env={
                        **shared,
                        "PACELINE_ROLE": "data",
                        "PACELINE_RANK": str(number),
                        "PACELINE_WORLD_SIZE": "1",
                        "PACELINE_BIND": cable.addresses[number // 2],
                    },
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                for number in range(4)
            ]
            trainer = {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_BIND": cable.addresses[0]}
            try:
                return read(run([*cable.enter(0), *command], {**shared, **trainer}))
            finally:
                for maker in makers:
                    maker.wait(timeout=_LIMIT_S)

    return way


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """Run one trainer to its end; its output, or what went wrong."""
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"data_pipeline: {' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def read(output: str) -> dict[str, float]:
    """Find the figures among what a trainer, or the launcher for it, has printed."""
    lines = [line[line.index("{") :] for line in output.splitlines() if "batches_per_s" in line]
    found: dict[str, float] = json.loads(lines[-1])
    return found


def compare(ways: dict[str, Way], rounds: int, share: float) -> list[dict[str, Any]]:
    """Measure every way for every cost, in turns; the first way is what others are compared to."""
    rows: list[dict[str, Any]] = []
    print(f"\n{'cost':8} {'way':34} {'batches/s':>10} {'samples/s':>10} {'x DataLoader':>13}")
    for cost, batches in _BATCHES.items():
        sizes = [str(max(20, int(batches * share))), str(_BATCH_SIZE)]
        turns: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                turns[name].append(ways[name](cost, sizes)["batches_per_s"])
        base = statistics.median(turns[names[0]])
        for name, found in turns.items():
            median = statistics.median(found)
            ratio = median / base
            rows.append({"cost": cost, "way": name, "batches_per_s": found, "ratio": ratio})
            print(
                f"{cost:8} {name:34} {median:10.1f} {median * _BATCH_SIZE:10.0f} {ratio:13.2f}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of few batches")
    quick = parser.parse_args().quick
    facts = machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    ways: dict[str, Way] = {
        "DataLoader(num_workers=2)": in_process,
        "--data-workers 2": data_workers,
    }
    rounds, share = (1, 0.1) if quick else (5, 1.0)
    if why := can_shape():
        print(f"  without a second host: {why}")
        rows = compare(ways, rounds, share)
    else:
        with Cable() as cable:
            ways["--data-workers 2, 2 on a second host"] = on_two_hosts(cable)
            rows = compare(ways, rounds, share)
    content = {"machine": facts, "quick": quick, "batch_size": _BATCH_SIZE, "rows": rows}
    print(f"written to {write_json('data_pipeline', content)}")


if __name__ == "__main__":
    main()
