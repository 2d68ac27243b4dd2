"""Training on a device through host memory: what it costs the host, and what overlaps.

    python bench/devices.py                    all parts, about 3 min
    python bench/devices.py --only overlap     hooks, overlap, waits, memory
    python bench/devices.py --quick            a smoke test: its figures mean nothing

Two workers train on `laggard`, the test device (testing/laggard), each on its own. No GPU is used:
times of the device are simulated (copies at 12 GB/s, an exchange at 5 GB/s, kernels by their
operations), times of the host are real.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.report import machine, write_json

BENCH = Path(__file__).resolve().parent
LAGGARD = BENCH.parent / "testing" / "laggard"
PARTS = ("hooks", "overlap", "waits", "memory")
SPEEDS = (0.25, 0.5, 1.0)  # teraflops: backward is longer than, as long as, shorter than the copies


def run(part: str, pace: str, *more: str) -> dict[str, Any]:
    """Run one part in a job of two workers; return what its first worker found."""
    paths = [str(LAGGARD), str(BENCH), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--devices", "laggard:0,1"]
    command += [str(BENCH / "device_runs" / "worker.py"), part, "--pace", pace, *more]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    for line in ended.stdout.splitlines():
        if "FOUND " in line:
            found: dict[str, Any] = json.loads(line.partition("FOUND ")[2])
            return found
    sys.exit(f"{part}: {' '.join(command)} ended with {ended.returncode}\n{ended.stderr[-4000:]}")


def measure(parts: list[str], pace: str, rounds: str) -> dict[str, Any]:
    """Print each figure when it is there; return all."""
    results: dict[str, Any] = {}
    if "hooks" in parts:
        found = results["hooks"] = run("hooks", pace, "--rounds", rounds)
        print(
            f"host time that {pace} adds to a step of {found['tensors']} tensors:"
            f" {found['added_least_ms']:.2f} ms by minimum, {found['added_ms']:.2f} by median,"
            f" {found['added_launches']:.0f} launches (without: {found['plain_ms']:.1f} ms; 5 us"
            " per launch and 25 per collective instead of the test device's own time, with which"
            f" it is {found['added_with_test_device_ms']:.1f} ms)"
        )
    if "overlap" in parts:
        for speed in SPEEDS:
            found = run("overlap", pace, "--tera-flops", str(speed))
            results[f"overlap {speed}"] = found
            print(
                f"overlap, {speed} TFLOP/s: backward {found['backward_ms']:.1f} ms,"
                f" {found['buckets']} buckets busy {found['busy_ms']:.1f} ms, exposed"
                f" {found['exposed_ms']:.1f} ms (best schedule {found['best_exposed_ms']:.1f} ms):"
                f" {100 * found['hidden_share']:.0f} % of what the schedule allows"
            )
    if "waits" in parts:
        found = results["waits"] = run("waits", pace, "--rounds", rounds)
        print(f"waits of the script's threads for the device: {found['waits_per_step']:g} per step")
        for stack in found["stacks"]:
            print(stack)
    if "memory" in parts:
        for name, more in (("registered", []), ("staged", ["--staged"])):
            found = results[f"memory {name}"] = run("memory", pace, *more)
            print(f"pinned memory, {name}: {found['pinned_buckets']:.2f} of the largest bucket")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--pace", default="allreduce[via=host]")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    built = subprocess.run([sys.executable, LAGGARD / "build.py"], check=False)
    if built.returncode:
        sys.exit("bench/devices.py needs the test device")
    results = measure(options.only or list(PARTS), options.pace, "3" if options.quick else "30")
    write_json("devices", {"machine": machine(), "pace": options.pace, **results})


if __name__ == "__main__":
    main()
