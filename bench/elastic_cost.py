"""The cost of elasticity when no worker is lost.

    python bench/elastic_cost.py
    python bench/elastic_cost.py --rounds 3 --width 2048 --batch 256

The same training (bench/chaos_runs/train.py) runs as a plain job, as an elastic one, and with every
partition on two servers, one after the other, in several rounds. Reported: the median step of each,
the smallest and the median over the rounds, how many times the plain job's step that is, and the
CPU time of one worker per step. The first seconds are left out: caches fill, and the workers meet.
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


def step_s(pace: str, options: list[str], arguments: argparse.Namespace) -> tuple[float, float]:
    """Train once; return the median time between two steps of a worker, once all is warm, and the
    CPU time of a step."""
    with tempfile.TemporaryDirectory(prefix="paceline-cost-") as diary:
        command = [sys.executable, "-m", "paceline", "run", "-n", str(arguments.workers)]
        command += [*options, "--pace", pace, str(TRAIN), "--steps", str(arguments.steps)]
        command += ["--batch", str(arguments.batch), "--width", str(arguments.width)]
        done = subprocess.run([*command, "--diary", diary], capture_output=True, check=False)
        if done.returncode:
            sys.stdout.write(done.stdout.decode() + done.stderr.decode())
            raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}")
        gaps, cpu_s = [], []
        for path in Path(diary).glob("*.txt"):
            lines = [line.split() for line in path.read_text().splitlines()]
            steps = [(float(line[0]), float(line[5])) for line in lines if line[1] == "step"]
            warm = [step for step in steps if step[0] > steps[0][0] + _WARM_S]
            gaps += [b[0] - a[0] for a, b in zip(warm, warm[1:], strict=False)]
            cpu_s.append((warm[-1][1] - warm[0][1]) / (len(warm) - 1))
        return statistics.median(gaps), statistics.mean(cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pace", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--ways", type=int, default=3, help="only the first of each pace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128, help="of each worker")
    parser.add_argument("--width", type=int, default=1536)
    arguments = parser.parse_args()
    found = {}
    for pace in arguments.pace:
        ways = WAYS[pace][: arguments.ways]
        times: dict[str, list[float]] = {name: [] for name, _, _ in ways}
        cpu: dict[str, list[float]] = {name: [] for name, _, _ in ways}
        for _ in range(arguments.rounds):
            for name, text, options in ways:
                gap_s, cpu_s = step_s(text, options, arguments)
                times[name].append(gap_s)
                cpu[name].append(cpu_s)
        base = times[ways[0][0]]
        print(f"{pace}: {arguments.workers} workers, median step")
        for name, values in times.items():
            best, median = min(values), statistics.median(values)
            ratio = best / min(base), median / statistics.median(base)
            print(
                f"  {name:26} min {1000 * best:7.1f} ms  median {1000 * median:7.1f} ms"
                f"   x {ratio[0]:.3f} (of min)  x {ratio[1]:.3f} (of median)"
                f"   CPU min {1000 * min(cpu[name]):.1f} ms",
                flush=True,
            )
        found[pace] = {"step_s": times, "cpu_s": cpu}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "elastic_cost.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
