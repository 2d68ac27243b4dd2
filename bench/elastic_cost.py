"""The cost of elasticity when no worker is lost.

    python bench/elastic_cost.py
    python bench/elastic_cost.py --rounds 3 --width 2048 --batch 256

The same training (bench/chaos_runs/train.py) runs as a plain job, as an elastic one, and with every
partition on two servers, one after the other, in several rounds. Reported: the median step of each,
the smallest and the median over the rounds, and how many times the plain job's step that is. The
first seconds are left out: caches fill, and the workers meet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRAIN = HERE / "chaos_runs" / "train.py"
_WARM_S = 6.0
WAYS = {
    "allreduce": [
        ("plain", "allreduce", []),
        ("elastic", "allreduce", ["--min", "1"]),
        ("plain, update=replicated", "allreduce[update=replicated]", []),
    ],
    "ps": [
        ("plain", "ps", ["-s", "2"]),
        ("elastic, one copy", "ps", ["-s", "2", "--min", "1"]),
        ("elastic, two copies", "ps", ["-s", "2", "--min", "1", "--replicas", "2"]),
    ],
    "async": [
        ("plain", "async", ["-s", "2"]),
        ("elastic, one copy", "async", ["-s", "2", "--min", "1"]),
        ("elastic, two copies", "async", ["-s", "2", "--min", "1", "--replicas", "2"]),
    ],
}


def step_s(pace: str, options: list[str], arguments: argparse.Namespace) -> float:
    """Train once; return the median time between two steps of a worker, once all is warm."""
    with tempfile.TemporaryDirectory(prefix="paceline-cost-") as diary:
        command = [sys.executable, "-m", "paceline", "run", "-n", str(arguments.workers)]
        command += [*options, "--pace", pace, str(TRAIN), "--steps", str(arguments.steps)]
        command += ["--batch", str(arguments.batch), "--width", str(arguments.width)]
        done = subprocess.run([*command, "--diary", diary], capture_output=True, check=False)
        if done.returncode:
            sys.stdout.write(done.stdout.decode() + done.stderr.decode())
            raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}")
        gaps = []
        for path in Path(diary).glob("*.txt"):
            lines = [line.split() for line in path.read_text().splitlines()]
            times = [float(line[0]) for line in lines if line[1] == "step"]
            times = [at_s for at_s in times if at_s > times[0] + _WARM_S]
            gaps += [b - a for a, b in zip(times, times[1:], strict=False)]
        return statistics.median(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pace", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128, help="of each worker")
    parser.add_argument("--width", type=int, default=1536)
    arguments = parser.parse_args()
    found = {}
    for pace in arguments.pace:
        times: dict[str, list[float]] = {name: [] for name, _, _ in WAYS[pace]}
        for _ in range(arguments.rounds):
            for name, text, options in WAYS[pace]:
                times[name].append(step_s(text, options, arguments))
        base = times[WAYS[pace][0][0]]
        print(f"{pace}: {arguments.workers} workers, median step")
        for name, values in times.items():
            best, median = min(values), statistics.median(values)
            ratio = best / min(base), median / statistics.median(base)
            print(
                f"  {name:26} min {1000 * best:7.1f} ms  median {1000 * median:7.1f} ms"
                f"   x {ratio[0]:.3f} (of min)  x {ratio[1]:.3f} (of median)",
                flush=True,
            )
        found[pace] = times
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "elastic_cost.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
